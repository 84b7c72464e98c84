"""Stands for ssh between the hosts of pretended_hosts.py, where no ssh server is installed.

    python pretended_ssh.py serve ADDRESS            on a host: run the lines that come
    python pretended_ssh.py [OPTION]... HOST LINE    as ssh: run a line of shell there, with this input and output

A connection carries the line, then the input; and back what the line writes. Exit codes and stderr stay there.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

PORT = 2222


def install(folder: Path) -> None:
    """Write the program `ssh` into a folder, which is to be first on PATH."""
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\nexec /usr/bin/python3 {Path(__file__).resolve()} "$@"\n')
    program.chmod(0o755)


def serve(address: str) -> None:
    """Run the lines that come, for ever."""
    with socket.create_server((address, PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            line = b""
            while not line.endswith(b"\0"):
                line += connection.recv(1)
            with connection:
                words = ["sh", "-c", line[:-1].decode()]
                subprocess.Popen(words, stdin=connection, stdout=connection, cwd="/", start_new_session=True)


def call(host: str, line: str) -> None:
    """Run a line on a host."""
    with socket.create_connection((host, PORT), timeout=10) as connection:
        connection.settimeout(None)
        connection.sendall(line.encode() + b"\0")

        def send() -> None:
            while data := os.read(0, 1 << 16):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        with connection.makefile("rb", buffering=0) as file, open(1, "wb", buffering=0) as output:
            shutil.copyfileobj(file, output)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    call(sys.argv[-2], sys.argv[-1])
