"""What the processes have in common that the launcher sends to the hosts: how they notice its silence, how they listen.

Sent to the hosts as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

_MOST_WAITING = 4096
# A process of the same job that was cut off from the launcher may be about to end.
_NAME_SECONDS = 5.0
# After such a gap this host was silent, not the launcher: it was suspended or frozen.
_GAP_SECONDS = 5.0


class Hearing:
    """Ask `is_lost` at least once a second."""

    def __init__(self, silence_seconds: float) -> None:
        """The launcher may be silent for that long; 0: for ever."""
        self._silence_seconds = silence_seconds
        self._heard = self._looked = time.monotonic()

    def is_lost(self, *, has_come: bool) -> bool:
        """True if the launcher has been silent for too long; `has_come`: it has just been heard."""
        now = time.monotonic()
        if has_come or now - self._looked > _GAP_SECONDS:
            self._heard = now
        self._looked = now
        return bool(self._silence_seconds) and now - self._heard > self._silence_seconds


def listen(name: str, is_taken: Callable[[], None] = lambda: None) -> socket.socket:
    """Make the abstract socket of this name, at which processes of this host can call.

    While another process has the name, `is_taken` is called before each further attempt.

    Raises:
        OSError: the name stays taken.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            listener.bind("\0" + name)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                listener.close()
                raise
            is_taken()
            time.sleep(0.1)
    listener.listen(_MOST_WAITING)
    listener.setblocking(False)
    return listener
