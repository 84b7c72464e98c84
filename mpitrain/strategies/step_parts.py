"""Where the time of a training's steps goes on this rank, measured while it trains with the others."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

from mpitrain.exchange.overlap import Overlap

# The standard error of a median of values with a normal distribution is 1.25 sigma / sqrt(n); its quarters lie 1.35
# sigma apart.
_ERROR_OF_QUARTERS = 1.25 / 1.35


@dataclass(frozen=True)
class StepMedians:
    """Some steps of one rank.

    Attributes:
        seconds: of a step, from the end of the exchange before to the end of its own; the median.
        error: the standard error of that median, from the spread of the steps.
        own_seconds: of a step without the time in which it only waits for the exchange; the median.
        ready: seconds after the end of the exchange before at which each gradient was in, by index; medians.
        busy_cores: that the process kept busy.
    """

    seconds: float
    error: float
    own_seconds: float
    ready: tuple[float, ...]
    busy_cores: float


class StepParts:
    """Measures steps. One thread calls it."""

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._since: float | None = None  # the end of the step before
        self.clear(0)

    def clear(self, skipped: int) -> None:
        """Forget all steps, and leave out so many of the next ones."""
        self._skip = skipped
        self._seconds: list[float] = []
        self._own: list[float] = []
        self._ready: list[list[float]] = []
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Note that a step of this rank begins."""
        self._now = [0.0] * self._num_parameters

    def ready(self, index: int) -> None:
        """Note that a gradient is in."""
        if self._since is not None:
            self._now[index] = time.perf_counter() - self._since

    def end(self, overlap: Overlap) -> None:
        """Note that a step has its means."""
        now = time.perf_counter()
        if self._skip > 0 or self._since is None:
            self._skip -= 1
        else:
            seconds = now - self._since
            self._seconds.append(seconds)
            self._own.append(max(0.0, seconds - overlap.exposed_seconds))
            self._ready.append(self._now)
        if self._skip <= 0 and self._began is None:
            self._began = now, time.process_time()
        self._since = now

    def medians(self, *, with_ready: bool) -> StepMedians | None:
        """Return the medians of all steps since `clear`; None: there are none. Without `with_ready`, `ready` is ()."""
        if not self._seconds:
            return None
        assert self._began is not None
        passed = time.perf_counter() - self._began[0]
        quarters = statistics.quantiles(self._seconds, n=4, method="inclusive") if len(self._seconds) > 1 else [0, 0, 0]
        error = _ERROR_OF_QUARTERS * (quarters[2] - quarters[0]) / math.sqrt(len(self._seconds))
        return StepMedians(
            statistics.median(self._seconds),
            error,
            statistics.median(self._own),
            tuple(statistics.median(times) for times in zip(*self._ready, strict=True)) if with_ready else (),
            (time.process_time() - self._began[1]) / passed if passed > 0 else 1.0,
        )
