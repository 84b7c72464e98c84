"""The choice of the next exchange configuration: forecast, tried, and kept only if its measured steps are shorter.

    first steps ──> forecast ──a way is 5 % faster──> trial ──shorter by more than noise──> kept
                       ^                                └──────otherwise──> the way before, again
                       └── the steps take longer or shorter than before, or a thousand steps have passed

So a wrong forecast costs only the few steps of a trial. Chooser runs on rank 0 and decides from numbers alone.
StepParts measures on each rank how the time of its steps is spent during training.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpitrain.forecast.ways import ExchangeWay
from mpitrain.noise import median_and_error, noise
from mpitrain.reducer.means import Overlap


@dataclass(frozen=True)
class StepMedians:
    """Some steps of one rank.

    Attributes:
        seconds: of a step, from the end of the exchange before to the end of its own; the median.
        error: the standard error of that median, from the spread of the steps.
        own_seconds: of a step, without the time in which it only waits for the exchange; the median.
        ready: by index, how many seconds after the end of the previous exchange each gradient was available; medians.
        busy_cores: the number of cores that the process kept busy.
    """

    seconds: float
    error: float
    own_seconds: float
    ready: tuple[float, ...]
    busy_cores: float


class StepParts:
    """Measures steps. Only one thread calls it."""

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._since: float | None = None  # the end of the step before
        self.clear(0)

    def clear(self, skipped: int) -> None:
        """Forget all steps, and do not measure the next `skipped` steps."""
        self._skip = skipped
        self._seconds: list[float] = []
        self._own: list[float] = []
        self._ready: list[list[float]] = []
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Note that a step of this rank begins."""
        self._now = [0.0] * self._num_parameters

    def ready(self, index: int) -> None:
        """Note that a gradient is available."""
        if self._since is not None:
            self._now[index] = time.perf_counter() - self._since

    def end(self, overlap: Overlap) -> None:
        """Note that a step's means are available."""
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
        return StepMedians(
            *median_and_error(self._seconds),
            statistics.median(self._own),
            tuple(statistics.median(times) for times in zip(*self._ready, strict=True)) if with_ready else (),
            (time.process_time() - self._began[1]) / passed if passed > 0 else 1.0,
        )


# The first steps load libraries and allocate memory; the first steps of a new configuration also allocate.
_FIRST_SKIPPED, _FIRST_STEPS, TRIAL_SKIPPED = 3, 10, 2
# A trial is judged twice, so that a far slower configuration is abandoned early.
_TRIAL_STEPS, _REST_OF_TRIAL = 3, 7
_HOLD_STEPS, _STEPS_TO_ANOTHER_LOOK = 50, 1000
# The smallest gain that is worth a trial. Forecasts are wrong by about as much (benchmarks/log/).
_GAIN = 0.05
_FAR_SLOWER, _DRIFT = 1.2, 0.25
# Rank 0 forecasts for at most this share of the time. With 32 nodes, it takes half a minute (benchmarks/log/).
_FORECAST_SHARE = 0.01


@dataclass(frozen=True)
class StepSeconds:
    """Some steps of all ranks together.

    Attributes:
        seconds: of a step, on the slowest rank.
        error: the standard error.
        least: the longest computation of any rank in a step: no exchange makes steps shorter.
    """

    seconds: float
    error: float
    least: float


@dataclass(frozen=True)
class Decision:
    """The decision on how all ranks continue.

    Attributes:
        way: the way of the next steps.
        kept: the way that a checkpoint has: that of the next steps, if it is not only tried.
        num_steps: the number of steps until the next decision.
        skipped: the number of next steps that are not measured; None: earlier measurements stay valid.
        line: describes a permanent change; "": there is none.
    """

    way: ExchangeWay
    kept: ExchangeWay
    num_steps: int
    skipped: int | None = 0
    line: str = ""


class Chooser:
    """Decides from look to look."""

    def __init__(self, plain: ExchangeWay, present: ExchangeWay, step: int) -> None:
        """
        Args:
            plain: the way that a job takes without a choice.
            present: the way to begin with.
            step: the number of steps made so far.
        """
        self._plain, self._present, self._step = plain, present, step
        self._before: tuple[ExchangeWay, StepSeconds] | None = None  # during a trial
        self._predicted = self._tried_since = 0.0
        self._trial_goes_on = False
        self._reference = math.nan  # seconds of a step of the present way
        self._failed: dict[ExchangeWay, int] = {}  # until which step a configuration is not tried again
        self._num_failures = 0
        self._next_forecast = self._next_drift = step
        self._earliest_forecast = 0.0

    def begin(self) -> Decision:
        """Return the number of steps until the first decision."""
        return Decision(self._present, self._present, _FIRST_SKIPPED + _FIRST_STEPS, _FIRST_SKIPPED)

    def look(
        self, step: int, made: StepSeconds, forecasts: Callable[[ExchangeWay], Mapping[ExchangeWay, float]]
    ) -> Decision:
        """Decide after `step` steps; `made` has the times of the most recent ones.

        `forecasts` takes the configuration of these steps, and returns the seconds of a step for each configuration,
        including that one.
        """
        self._step = step
        if self._before:
            return self._judge(made)
        if step >= self._next_drift:
            if abs(made.seconds / self._reference - 1) > _DRIFT:
                self._failed, self._next_forecast = {}, step
            self._reference = made.seconds
        # If nothing can be gained over the plain configuration, no forecast is needed. Another one may have become
        # slower.
        is_best = self._present == self._plain and made.least > made.seconds * (1 - _GAIN)
        if is_best or step < max(self._next_forecast, self._earliest_forecast):
            return self._hold()
        self._next_forecast = step + _STEPS_TO_ANOTHER_LOOK
        predicted = {
            way: seconds
            for way, seconds in forecasts(self._present).items()
            if way != self._present and self._failed.get(way, 0) <= step
        }
        best = min(predicted, key=predicted.__getitem__, default=self._present)
        if best == self._present or predicted[best] > made.seconds * (1 - _GAIN):
            return self._hold()
        self._before, self._present, self._predicted = (self._present, made), best, predicted[best]
        self._tried_since, self._trial_goes_on = step, False
        return Decision(best, self._before[0], TRIAL_SKIPPED + _TRIAL_STEPS, TRIAL_SKIPPED)

    def look_took(self, seconds: float) -> None:
        """Note how long the last decision took. The next forecasts wait until that is a small share of the time."""
        earliest = self._step + seconds / (_FORECAST_SHARE * self._reference)
        self._earliest_forecast = max(self._earliest_forecast, earliest)

    def _hold(self, line: str = "") -> Decision:
        return Decision(self._present, self._present, _HOLD_STEPS, TRIAL_SKIPPED, line)

    def _judge(self, made: StepSeconds) -> Decision:
        """Keep the configuration that is being tried, continue the trial, or go back."""
        assert self._before
        before, base = self._before
        far_slower = made.seconds > base.seconds * _FAR_SLOWER
        if not self._trial_goes_on and not far_slower:
            self._trial_goes_on = True
            return Decision(self._present, before, _REST_OF_TRIAL, None)
        self._before = None
        times = f"{shown_ms(made.seconds)} instead of {shown_ms(base.seconds)} a step"
        predicted = f"(predicted {shown_ms(self._predicted)})"
        tried = self._present
        if base.seconds - made.seconds > noise(base.seconds, base.error, made.error):
            self._reference, self._next_forecast = made.seconds, self._step  # another one may be faster still
            return self._hold(f"{shown_way(tried)} instead of {shown_way(before)}: {times} {predicted}")
        self._num_failures += 1
        self._failed[tried] = self._step + _STEPS_TO_ANOTHER_LOOK * 2**self._num_failures
        # Step times that go up and down all the time are no reason for continual trials.
        self._next_drift = self._step + _HOLD_STEPS * 2**self._num_failures
        self._present, self._reference, self._next_forecast = before, base.seconds, self._step
        return self._hold(
            f"{shown_way(before)} again: {shown_way(tried)} was tried since step {self._tried_since:.0f}, "
            f"{times} {predicted}"
        )


def shown_way(way: ExchangeWay) -> str:
    """Describe a configuration for users."""
    name = way.codec if way.codec != "none" or way.algorithm == "auto" else f"none by {way.algorithm}"
    return name if way.bucket_mib is None else f"{name} in buckets of {way.bucket_mib:g} MiB"


def shown_ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"
