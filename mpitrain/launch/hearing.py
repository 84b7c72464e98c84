"""The connection from a program on a host to its launcher: how the program sends, and how it notices silence.

Sent to the hosts as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

_TICK_SECONDS = 1.0
# So much longer the main thread may take to end the process: it looks at disks, and writes to the launcher.
STUCK_SECONDS = 30.0

_sending = threading.Lock()


class Hearing:
    """Whether the launcher, which sends something to stdin every second, is still heard. Make it first of all.

    A thread counts the seconds of silence, also while the main thread is busy. A host that was frozen has counted none,
    so it does not take its own silence for the launcher's. If the main thread hangs, in a look at a dead share or in a
    write that nobody reads, the thread ends the process.
    """

    def __init__(self, silence_seconds: float, last: Callable[[], object] = lambda: None) -> None:
        """The launcher may be silent for that long; 0: forever, but it must not disconnect.

        `last` is called, in the thread, before it ends the process.
        """
        self._silence_seconds, self._last = silence_seconds, last
        self._silent = 0.0
        threading.Thread(target=self._count, name="hearing", daemon=True).start()

    def is_lost(self, *, has_come: bool) -> bool:
        """True if the launcher has been silent for too long; `has_come`: it has just been heard."""
        if has_come:
            self._silent = 0.0
        return 0 < self._silence_seconds < self._silent

    def _count(self) -> None:
        unread, stuck = 0, 0.0
        line = select.poll()
        line.register(0, select.POLLHUP)
        while stuck <= STUCK_SECONDS:
            time.sleep(_TICK_SECONDS)
            now = _unread()
            self._silent = 0.0 if now > unread else self._silent + _TICK_SECONDS
            unread = now
            is_lost = 0 < self._silence_seconds < self._silent or bool(line.poll(0))
            stuck = stuck + _TICK_SECONDS if is_lost else 0.0
        try:
            self._last()
        finally:
            os._exit(1)


def _unread() -> int:
    """How many bytes wait in stdin."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, b"\0" * 4))[0])
    except OSError:  # closed
        return 0


def send(message: dict[str, Any]) -> None:
    """Send a line to the launcher, which may be gone. Any thread may call."""
    data = (json.dumps(message) + "\n").encode()
    with _sending, contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]
