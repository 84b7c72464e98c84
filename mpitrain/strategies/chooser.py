"""Which way of an exchange is taken next: forecast, tried, and kept only if its measured steps are shorter.

    first steps ──> forecast ──a way is 5 % faster──> trial ──shorter by more than noise──> kept
                       ^                                └──────otherwise──> the way before, again
                       └── the steps take longer or shorter than before, or a thousand steps have passed

So a forecast that is wrong costs the few steps of a trial. This file decides from numbers alone, on rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpitrain.plan.ways import ExchangeWay

# The first steps load libraries and take memory; the first steps of another way allocate.
_FIRST_SKIPPED, _FIRST_STEPS, TRIAL_SKIPPED = 3, 10, 2
# A trial is looked at twice, so that a way that is far slower ends soon.
_TRIAL_STEPS, _REST_OF_TRIAL = 3, 7
_HOLD_STEPS, _STEPS_TO_ANOTHER_LOOK = 50, 1000
# A trial is worth its steps from this gain on. Forecasts are wrong by about as much (docs/log.md).
_GAIN = 0.05
# Differences below this share, or below so many standard errors, are noise.
_NOISE, _ERRORS = 0.02, 2.0
_FAR_SLOWER, _DRIFT = 1.2, 0.25
# Rank 0 forecasts for at most this share of the time. With 32 nodes, it takes half a minute (docs/log.md).
_FORECAST_SHARE = 0.01


@dataclass(frozen=True)
class StepSeconds:
    """Some steps of all ranks together.

    Attributes:
        seconds: of a step, on the slowest rank.
        error: the standard error.
        least: the most that a rank computes in a step: no exchange makes steps shorter.
    """

    seconds: float
    error: float
    least: float


@dataclass(frozen=True)
class Decision:
    """How all ranks go on.

    Attributes:
        way: the way of the next steps.
        kept: the way that a checkpoint has: that of the next steps, if it is not only tried.
        num_steps: until the next look.
        skipped: so many of the next steps are not measured; None: what was measured so far counts further.
        line: what has changed for good; "": nothing.
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
        self._failed: dict[ExchangeWay, int] = {}  # until which step a way is not tried again
        self._num_failures = 0
        self._next_forecast = self._next_drift = step
        self._earliest_forecast = 0.0

    def begin(self) -> Decision:
        """Return how long the first look is away."""
        return Decision(self._present, self._present, _FIRST_SKIPPED + _FIRST_STEPS, _FIRST_SKIPPED)

    def look(
        self, step: int, made: StepSeconds, forecasts: Callable[[ExchangeWay], Mapping[ExchangeWay, float]]
    ) -> Decision:
        """Decide after `step` steps, of which the last ones took `made.seconds`.

        `forecasts` gets the way of these steps, and returns seconds of a step for each way, also for that one.
        """
        self._step = step
        if self._before:
            return self._judge(made)
        if step >= self._next_drift:
            if abs(made.seconds / self._reference - 1) > _DRIFT:
                self._failed, self._next_forecast = {}, step
            self._reference = made.seconds
        # If the plain way has nothing to win, there is nothing to forecast. Another way may have become the slower one.
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
        """Note how long the last look took. The next forecasts wait until that is a small share of the time."""
        earliest = self._step + seconds / (_FORECAST_SHARE * self._reference)
        self._earliest_forecast = max(self._earliest_forecast, earliest)

    def _hold(self, line: str = "") -> Decision:
        return Decision(self._present, self._present, _HOLD_STEPS, TRIAL_SKIPPED, line)

    def _judge(self, made: StepSeconds) -> Decision:
        """Keep the way that is tried, go on with the trial, or go back."""
        assert self._before
        before, base = self._before
        far_slower = made.seconds > base.seconds * _FAR_SLOWER
        if not self._trial_goes_on and not far_slower:
            self._trial_goes_on = True
            return Decision(self._present, before, _REST_OF_TRIAL, None)
        self._before = None
        noise = max(_NOISE * base.seconds, _ERRORS * math.hypot(base.error, made.error))
        times = f"{shown_ms(made.seconds)} instead of {shown_ms(base.seconds)} a step"
        predicted = f"(predicted {shown_ms(self._predicted)})"
        tried = self._present
        if base.seconds - made.seconds > noise:
            self._reference, self._next_forecast = made.seconds, self._step  # another one may be faster still
            return self._hold(f"{shown_way(tried)} instead of {shown_way(before)}: {times} {predicted}")
        self._num_failures += 1
        self._failed[tried] = self._step + _STEPS_TO_ANOTHER_LOOK * 2**self._num_failures
        # Where the times of steps go up and down all the time, that too is no reason for one trial after the other.
        self._next_drift = self._step + _HOLD_STEPS * 2**self._num_failures
        self._present, self._reference, self._next_forecast = before, base.seconds, self._step
        return self._hold(
            f"{shown_way(before)} again: {shown_way(tried)} was tried since step {self._tried_since:.0f}, "
            f"{times} {predicted}"
        )


def shown_way(way: ExchangeWay) -> str:
    """Return a way for people."""
    name = way.codec if way.codec != "none" or way.algorithm == "auto" else f"none by {way.algorithm}"
    return name if way.bucket_mib is None else f"{name} in buckets of {way.bucket_mib:g} MiB"


def shown_ms(seconds: float) -> str:
    """Return milliseconds."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"
