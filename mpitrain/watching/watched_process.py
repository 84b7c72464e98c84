"""A process that is watched, and what the kernel says of it.

Sent to other hosts as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import ctypes
import fcntl
import select
import struct
from pathlib import Path

_PIDFD_OPEN = 434  # the system call's number, on all processors
# linux/pidfd.h: struct pidfd_info begins with the mask, and has the exit code as the last of these bytes.
_PIDFD_GET_INFO, _INFO_EXIT, _INFO_BYTES, _EXIT_CODE_AT = 0xC040FF0B, 1 << 3, 64, 60
# Of /proc/PID/stat, counted from the state: proc(5).
_EXIT_CODE_FIELD = 49


class WatchedProcess:
    """A process, and its end. epoll reports the end of a process with a descriptor; old kernels need polling."""

    def __init__(self, pid: int, descriptor: int | None) -> None:
        self.pid, self.descriptor = pid, descriptor
        self.order: int | None = None  # the place of its end among all ends seen
        self.ended_at = 0.0
        self.code: int | None = None
        self._began = _began(pid)

    def is_gone(self) -> bool:
        """Return whether the process has ended, also if its number belongs to another one now."""
        began = _began(self.pid)
        return not began or began != self._began

    def note_code(self) -> None:
        """After the end: note the exit code, or the signal's number below 0. It stays None if the kernel does not tell.

        The record of a zombie has it. Once the parent has asked for it, the descriptor has it (since Linux 6.15).
        """
        fields = _stat(self.pid)
        status = None
        if fields and fields[0] == b"Z":
            status = int(fields[_EXIT_CODE_FIELD])
        elif self.descriptor is not None:
            status = _status_of(self.descriptor)
        if status is not None:
            self.code = -(status & 0x7F) if status & 0x7F else status >> 8


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


def _status_of(descriptor: int) -> int | None:
    """Return the status with which a process has ended, as wait(2) gives it."""
    info = bytearray(struct.pack("Q", _INFO_EXIT) + bytes(_INFO_BYTES - 8))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info, True)
    except OSError:  # an old kernel
        return None
    (told,) = struct.unpack_from("Q", info)
    return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0]) if told & _INFO_EXIT else None


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
