"""The processes of a job on this host: those with the job's mark in their environment, and their descendants.

Sent to the guards as text. So this module imports only the modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from mpitrain.job.context import JOB

_KILL_SECONDS = 5.0


class Marked:
    """The processes of the job with this id, without this process."""

    def __init__(self, token: str, name: str = JOB) -> None:
        """`name` is the variable that holds the id."""
        self._mark = f"{name}={token}".encode()

    def find(self) -> set[int]:
        """Return their process ids, without zombies."""
        children: dict[int, list[int]] = {}
        to_do = []
        for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
            if not entry.isdigit():
                continue
            stat, environment = read(f"/proc/{entry}/stat"), read(f"/proc/{entry}/environ")
            if not stat:
                continue
            marked = self._mark in environment.split(b"\0")
            # "pid (name) state parent ...", where the name may hold spaces and brackets.
            process_state, parent = stat.rpartition(b")")[2].split()[:2]
            if process_state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
                if marked:
                    to_do.append(int(entry))
        job: set[int] = set()
        while to_do:
            pid = to_do.pop()
            if pid not in job and pid != os.getpid():
                job.add(pid)
                to_do.extend(children.get(pid, []))
        return job

    def end(self, linger_seconds: float) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Let the processes end by themselves for that long, then kill the rest: return these, and immortal ones."""
        until = time.monotonic() + linger_seconds
        while (left := self.find()) and time.monotonic() < until:
            time.sleep(0.05)
        killed = [(pid, command_line(pid)) for pid in sorted(left)]
        deadline = time.monotonic() + _KILL_SECONDS
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            left = self.find()
        return killed, [(pid, command_line(pid)) for pid in sorted(left)]


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if the process is gone."""
    return read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def read(path: str) -> bytes:
    """Return a file of /proc; empty if the process is gone or belongs to another user."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(OSError):
        Path(path).unlink()
