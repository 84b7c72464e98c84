"""How much of a step's exchange was hidden behind the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """Where the time of a step went on this rank.

    Attributes:
        compute_seconds: between `begin` and `finish`: the forward and the backward pass.
        exposed_seconds: in `finish`: the time by which the exchange lengthens the step.
        wire_seconds: the time with at least one bucket under way, in `finish` or before; includes the wait for slower
            ranks.
    """

    compute_seconds: float
    exposed_seconds: float
    wire_seconds: float

    @property
    def hidden(self) -> float:
        """The share of the exchange that the step did not wait for, 0 to 1."""
        return hidden_share(self.exposed_seconds, self.wire_seconds)


def hidden_share(exposed_seconds: float, wire_seconds: float) -> float:
    """Return 1 - exposed / wire, at least 0; 1 if nothing was exchanged."""
    return max(0.0, 1 - exposed_seconds / wire_seconds) if wire_seconds > 0 else 1.0


class Stopwatch:
    """Measures the times of a step; only one thread at a time may call it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def begin(self) -> None:
        """Begin a step; nothing is under way."""
        self._wire = 0.0
        self._busy_since: float | None = None
        self._begun = self._now()

    def busy(self) -> None:
        """A bucket starts."""
        if self._busy_since is None:
            self._busy_since = self._now()

    def idle(self) -> None:
        """Note that all buckets that were started have arrived."""
        if self._busy_since is not None:
            self._wire += self._now() - self._busy_since
            self._busy_since = None

    def finish(self) -> None:
        """Note that the backward pass has ended."""
        self._finishing = self._now()

    @property
    def computed(self) -> tuple[float, float]:
        """Begin and end of the forward and the backward pass."""
        return self._begun, self._finishing

    def end(self) -> Overlap:
        """Note that every bucket has arrived."""
        return Overlap(self._finishing - self._begun, self._now() - self._finishing, self._wire)
