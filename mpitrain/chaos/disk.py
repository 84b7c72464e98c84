"""Filling a disk: only a small file system of its own, which nobody else needs.

Sent to hosts as text: this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILLER = ".mpitrain-chaos-fills-this-disk"
MOST_DISK_BYTES = 256 << 20  # a tmpfs is memory
_SHARED_PLACES = ("/", "/tmp", "/run", "/dev/shm", "/var", "/home")


def refusal_to_fill(folder: str) -> str:
    """Say why the disk with this folder must not be filled; "" if it may be: a small file system of its own."""
    try:
        device = Path(folder).stat().st_dev
        status = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    shared = [place for place in _SHARED_PLACES if Path(place).exists() and Path(place).stat().st_dev == device]
    if shared:
        return f"{folder} is on the file system of {shared[0]}, which others need"
    size_bytes = status.f_blocks * status.f_frsize
    if size_bytes > MOST_DISK_BYTES:
        return (
            f"{folder} is on a file system of {size_bytes >> 20} MiB; chaos fills at most {MOST_DISK_BYTES >> 20} MiB"
        )
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


def fill(path: str) -> None:
    """Make a file in this folder that takes all free room."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        for size_bytes in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size_bytes))
