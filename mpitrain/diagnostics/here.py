"""This machine by itself: the same agent as on a node, as a process beside this one, without ssh."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

from mpitrain.diagnostics.agent import AgentClient
from mpitrain.diagnostics.bundle import BOOT, in_a_word
from mpitrain.diagnostics.check import Target
from mpitrain.launch import processes
from mpitrain.launch.hostfile import Host
from mpitrain.launch.variables import network_variables

_END_SECONDS = 5.0


def target_here() -> Target:
    """This machine, this user and this Python; no share, no set-up, no inventory."""
    host = Host(socket.gethostname(), _own_address())
    return Target(
        hosts=(host,),
        user=_user(),
        share=None,
        venv=sys.prefix,
        settings={},
        set_up="",
        environ=network_variables(os.environ),
        python_here=sys.executable,
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run as a number without a name
        return str(os.getuid())


def _own_address() -> str:
    """Return this machine's address on the way to others; that of the loopback if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question:
        try:
            question.connect(("192.0.2.1", 9))  # chooses a route; nothing is sent
        except OSError:
            return "127.0.0.1"
        address: str = question.getsockname()[0]
        return address


def log_in(host: Host) -> AgentClient:
    """Start the agent of this machine. Closing the agent ends everything that it has started."""
    started = time.monotonic()
    return AgentClient(host, _OverPipes(), time.monotonic() - started)


class _OverPipes:
    """An `AgentConnection` to a process of this one."""

    python = sys.executable
    host_key = ""

    def open(self) -> None:
        # A process that a job of the agent has left behind becomes a child of this process.
        processes.adopt_orphans()
        self._before = processes.children()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (until close)
        self._process = subprocess.Popen(
            [self.python, "-I", "-u", "-c", in_a_word(BOOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the agent
        )

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def readline(self, most: int) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline(most)

    def last_words(self) -> str:
        code = self._process.wait()
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with code {code}"

    def cut(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        processes.kill_all(lambda: processes.alive_below(self._before))
        self._process.wait()
        self._words.close()
