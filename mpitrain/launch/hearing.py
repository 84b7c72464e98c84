"""How a process on a host of a job notices that the launcher has fallen silent.

Sent to the hosts as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import time

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
