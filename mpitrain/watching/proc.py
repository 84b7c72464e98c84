"""What /proc says of the processes of this host: proc(5).

The text of this module is sent to other hosts. It imports no other module of mpitrain, and runs with an old Python.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def read(path: str) -> bytes:
    """Return a file of /proc; empty if the process is gone or belongs to another user."""
    # An agent reads two for each process of its host, often; Path takes twice as long.
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


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on: state, parent ...; none: the process is gone."""
    # "pid (name) state parent ...", where the name may hold spaces and brackets.
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def opened(pid: int) -> Iterator[tuple[str, str]]:
    """Iterate over what a process has open: its path below /proc, and what that is. It may be gone, or another user's.

    It may have ended just now: then it is a zombie, whose folder is root's.
    """
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 (names are wanted)
            path = f"/proc/{pid}/fd/{entry}"
            with contextlib.suppress(OSError):  # closed meanwhile
                yield path, os.readlink(path)  # noqa: PTH115 (Path.readlink is of Python 3.9)
