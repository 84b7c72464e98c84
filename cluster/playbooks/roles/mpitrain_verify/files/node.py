"""What the shared user finds on one node: logins to the other nodes, Python and MPI, and files on the shared folder.

node.py RUN SHARE NAME...    writes SHARE/.mpitrain-verify-RUN/<this node> and prints JSON
node.py RUN SHARE --read     prints which nodes' files can be read here, as JSON
"""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOGIN_SECONDS = 20
COMMAND_SECONDS = 60
AT_ONCE = 8


def main() -> None:
    run, share, *names = sys.argv[1:]
    folder = Path(share, f".mpitrain-verify-{run}")
    if names == ["--read"]:
        # The folder is listed first: NFS may hide a new file from a lookup for a while, never from a listing.
        seen = {path.name: path.read_text() for path in sorted(folder.iterdir())}
        print(json.dumps(sorted(name for name, content in seen.items() if content == f"{run} {name}\n")))
        return
    own = socket.gethostname().split(".")[0]
    folder.mkdir(exist_ok=True)
    with (folder / own).open("w") as file:
        file.write(f"{run} {own}\n")
        file.flush()
        os.fsync(file.fileno())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        logins = dict(pool.map(lambda name: (name, log_in(name)), names))
    print(
        json.dumps(
            {"logins": {name: problem for name, problem in logins.items() if problem}, "commands": commands(own)}
        )
    )


def log_in(name: str) -> str:
    """What is wrong with a login to `name`; empty if nothing. A login must print nothing, or sftp and MPI fail."""
    code, out, error = ssh(name, "uname -n", LOGIN_SECONDS)
    if code != 0:
        return error.strip() or f"exit code {code}"
    answer = out.strip()
    return "" if answer.split(".")[0] == name else f"the host that answered is {answer!r}, not {name}"


def commands(own: str) -> list[str]:
    """The Python, mpiexec and mpitrain that a command over ssh finds, because MPI starts its ranks over ssh."""
    script = "python -c 'import sys; print(sys.executable, sys.version.split()[0])'; command -v mpiexec mpitrain"
    code, out, error = ssh(own, script, COMMAND_SECONDS)
    return out.splitlines() if code == 0 else [f"exit code {code}: {error.strip()}"]


def ssh(name: str, script: str, seconds: int) -> tuple[int, str, str]:
    """Exit code, output and error output of a command on another node. ssh asks no question."""
    try:
        done = subprocess.run(
            ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", name, script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer in {seconds} s"
    return done.returncode, done.stdout, done.stderr


main()
