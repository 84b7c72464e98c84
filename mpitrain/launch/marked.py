"""The processes of a job on this host: those with the job's mark in their environment, and their descendants.

Sent to the guards as text. So this module imports only the modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from mpitrain.job.context import JOB

_KILL_SECONDS = 5.0
_TRIES, _PAUSE_SECONDS = 10, 0.1
_KERNEL = 0x00200000  # PF_KTHREAD of the kernel: a thread of its own


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
            stat = read(f"/proc/{entry}/stat")
            if not stat:
                continue
            # "pid (name) state parent ...", where the name may hold spaces and brackets; the seventh are flags.
            fields = stat.rpartition(b")")[2].split(None, 7)
            if fields[0] in (b"Z", b"X") or int(fields[6]) & _KERNEL:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
            if self._mark in read(f"/proc/{entry}/environ").split(b"\0"):
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
        until, nap_seconds = time.monotonic() + linger_seconds, 0.02
        while (left := self.find()) and time.monotonic() < until:
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, 0.1)
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
    # A guard reads two for each process of its host, often; Path takes twice as long.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := os.read(file, 1 << 16):
            parts.append(part)
    except OSError:
        return b""
    finally:
        os.close(file)
    return b"".join(parts)


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(OSError):
        Path(path).unlink()


def remove_unheard(path: str) -> None:
    """Remove a socket if nobody listens there any more, and its folder if that is then empty.

    A process that is being killed may still listen for a moment.
    """
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.setblocking(False)
            try:
                line.connect(path)
            except ConnectionRefusedError:
                remove(path)
                with contextlib.suppress(OSError):
                    Path(path).parent.rmdir()
                return
            except OSError:
                return
        time.sleep(_PAUSE_SECONDS)
