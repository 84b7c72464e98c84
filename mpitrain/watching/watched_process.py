"""A process that is watched, and what the kernel says of it.

Sent to other hosts as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import ctypes
import select
from pathlib import Path

_PIDFD_OPEN = 434  # the system call's number, on all processors


class WatchedProcess:
    """A process, and its end. epoll reports the end of a process with a descriptor; old kernels need polling."""

    def __init__(self, pid: int, descriptor: int | None) -> None:
        self.pid, self.descriptor = pid, descriptor
        self.order: int | None = None  # the place of its end among all ends seen
        self.ended_at = 0.0
        self._began = _began(pid)

    def is_gone(self) -> bool:
        """Return whether the process has ended, also if its number belongs to another one now."""
        began = _began(self.pid)
        return not began or began != self._began


def is_readable(descriptor: int) -> bool:
    """Return whether a descriptor can be read now; that of a process can when the process has ended."""
    ready = select.poll()  # select() takes no descriptor above 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(0))


def open_process(pid: int) -> int | None:
    """Return a descriptor of a process; None if there is none.

    Python's own os.pidfd_open is missing before 3.9, and where Python was built on an old kernel.
    """
    descriptor = int(ctypes.CDLL(None).syscall(_PIDFD_OPEN, pid, 0))
    return None if descriptor < 0 else descriptor


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on: state, parent ..."""
    try:
        # "pid (name) state parent ...", where the name may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _began(pid: int) -> bytes:
    """Return when a process began, in ticks; empty if the process has ended."""
    fields = _stat(pid)
    return b"" if not fields or fields[0] in (b"Z", b"X") else fields[19]
