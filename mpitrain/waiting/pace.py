"""Says how long a rank may sleep between two looks at the wire."""

from __future__ import annotations

import time
from collections.abc import Callable

# Linux adds some 50 us to any sleep. Measured (docs/log.md): at 1 Gbit/s naps cost no time and save nine tenths of a
# core; at 10 Gbit/s any nap lets the wire run dry. Naps do not get longer with the time of a piece: if a rank waits for
# one that is late, the rate looks as if the wire were slow.
_SHORTEST_NAP, _LONGEST_NAP = 100e-6, 200e-6
_NAPS_A_PIECE = 4
# A shorter exchange ends before a nap would pay.
_LEAST_BYTES = 256 * 1024
# The bytes that switches and sockets take in at once say nothing about the rate of the wire.
_BUFFERED_BYTES = 256 * 1024
_FORGET = 0.99  # of the best rate, for each exchange; and one in so many is made without naps, to measure it again
_WITHOUT_NAPS = 32
# A wait that moves no data looks again at once for so long: other ranks that are as far as this one need some 20 us.
# Then it sleeps for a share of the time that it has lasted, so that it ends at most that share later.
_PATIENT_AFTER_SECONDS, _PATIENT_SHARE, _LONGEST_PATIENT_NAP = 10e-3, 1 / 64, 500e-6


class Pace:
    """Computes naps from the time that a piece takes at the best rate so far.

    The time between arrivals is no measure: it grows with the naps, and while other processes use the cores.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._begun = 0
        self._started = 0.0
        self._num_bytes = 0
        self._nap = 0.0

    def begin(self, num_bytes: int, piece_bytes: int) -> None:
        """Begin an exchange in which this rank receives `num_bytes` bytes, in pieces of `piece_bytes`."""
        self._num_bytes = num_bytes
        if num_bytes < _LEAST_BYTES:
            self._nap = 0.0
            return
        self._begun += 1
        self._started = time.perf_counter()
        if not self._rate or self._begun % _WITHOUT_NAPS == 0:
            self._nap = 0.0
            return
        nap = piece_bytes / self._rate / _NAPS_A_PIECE
        self._nap = 0.0 if nap < _SHORTEST_NAP else min(nap, _LONGEST_NAP)

    def nap(self) -> float:
        """The number of seconds to sleep. 0: look again at once."""
        return self._nap

    def end(self) -> None:
        """End the exchange."""
        if self._num_bytes >= _LEAST_BYTES:
            rate = (self._num_bytes - _BUFFERED_BYTES) / (time.perf_counter() - self._started)
            self._rate = max(rate, self._rate * _FORGET)


def patient_naps(longest_seconds: float = _LONGEST_PATIENT_NAP) -> Callable[[], float]:
    """Return a function for a wait that moves no data and begins now: the seconds to sleep before the next look."""
    begun = time.perf_counter()

    def nap() -> float:
        lasted = time.perf_counter() - begun
        return 0.0 if lasted < _PATIENT_AFTER_SECONDS else min(lasted * _PATIENT_SHARE, longest_seconds)

    return nap
