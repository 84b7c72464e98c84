"""Hooks that end a run: at a step, after a time, at a value of a metric, or when it no longer improves."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


# StopAfter looks at the clock at least this often, in steps, so that it notices if steps become slower.
_MOST_SECONDS_BETWEEN_LOOKS = 1.0


class StopAtStep(Hook):
    """End the run after step `number`, counted from the start of training, also across a resume."""

    ends_run = True

    def __init__(self, number: int) -> None:
        """`number` is the same on every rank. Raises ConfigError if it is below 1."""
        if number < 1:
            raise ConfigError(f"StopAtStep({number}): the last step is at least 1")
        self._number = number

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook. If there are several such hooks, the earliest step ends the run."""
        trainer.last_step = min(self._number, trainer.last_step or self._number)


class StopAfter(Hook):
    """End the run after the first step that ends `seconds` or more after the run began. A resumed run counts from 0.

    Rank 0's clock decides. Asking it after every step would cost a message per step. So rank 0 announces how many steps
    fit into half of the remaining time, but no more than have been made, and the ranks make these steps without asking.
    """

    ends_run = True

    def __init__(self, seconds: float) -> None:
        """Raises ConfigError if `seconds` is not a finite number above 0."""
        if not 0 < seconds < math.inf:
            raise ConfigError(f"StopAfter({seconds}): allowed is a finite number of seconds above 0")
        self._seconds = seconds

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook."""
        self._end = time.monotonic() + self._seconds
        self._looked, self._looked_at = time.monotonic(), trainer.step_number
        self._begun_at = trainer.step_number
        self._next = trainer.step_number + 1

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if step.number < self._next:
            return
        steps = trainer.world.broadcast_object(self._steps_to_make(step.number) if trainer.world.is_root else None)
        self._next = step.number + steps
        if steps == 0:
            stop(trainer, f"step {step.number}: stopped after {self._seconds:g} s")

    def _steps_to_make(self, number: int) -> int:
        """Return how many steps to make before the next look at the clock; 0: the time is up."""
        now = time.monotonic()
        step_seconds = (now - self._looked) / (number - self._looked_at)
        self._looked, self._looked_at = now, number
        if now >= self._end:
            return 0
        steps = int(min((self._end - now) / 2, _MOST_SECONDS_BETWEEN_LOOKS) / step_seconds)
        # The first step tells little, because its time does not include the hooks after this one.
        return max(1, min(steps, number - self._begun_at))


class StopWhen(Hook):
    """End the run when a metric is at least, or at most, a value. Hooks before this one must report the metric.

    Rank 0's value decides for all ranks. If no step had the metric, a warning goes to stderr at the end.
    """

    ends_run = True

    def __init__(self, metric: str, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """
        Args:
            metric: the name of the metric.
            at_least, at_most: give exactly one of them, in the unit of the metric. NaN does not end the run.

        Raises:
            ConfigError: both or none of them are given.
        """
        if (at_least is None) == (at_most is None):
            raise ConfigError(f"StopWhen({metric!r}, {at_least=}, {at_most=}): give at_least or at_most")
        self._metric = metric
        self._at_least = -math.inf if at_least is None else at_least
        self._at_most = math.inf if at_most is None else at_most
        self._seen: set[str] = set()

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return False

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        value = shared_metric(trainer, self._metric, self._seen)
        if value is None:
            return
        if self._at_least <= value <= self._at_most:
            stop(trainer, f"step {step.number}: stopped, {self._metric} is {value:.6g}")

    def after_run(self, trainer: Trainer) -> None:
        """See Hook."""
        say_unseen(trainer, "StopWhen", self._metric, self._seen)


def stop(trainer: Trainer, why: str) -> None:
    """End the run after the last step made, unless it ends there anyway. Call this on every rank."""
    if trainer.last_step is None or trainer.last_step > trainer.step_number:
        trainer.last_step = trainer.step_number
        trainer.world.print(why)


def shared_metric(trainer: Trainer, name: str, seen: set[str]) -> float | None:
    """Return rank 0's value of a metric of the last step, on every rank. None if this step does not have the metric.

    Raises:
        MismatchError: some ranks have the metric and some do not. Raised on every rank.
    """
    seen.update(trainer.metrics)
    if name not in trainer.metrics:
        return None
    return float(trainer.world.broadcast_object(trainer.metrics[name]))


def say_unseen(trainer: Trainer, hook: str, metric: str, seen: set[str]) -> None:
    """Report that no step had the metric that a hook waits for. `seen` are the metrics that the steps had."""
    if metric not in seen and trainer.world.is_root:
        print(
            f"mpitrain: {hook}: no step had the metric {metric!r}; those reported by hooks before it: "
            f"{', '.join(sorted(seen)) or 'none'}",
            file=sys.stderr,
            flush=True,
        )


class EarlyStopping(Hook):
    """End the run when a metric has not improved `patience` times in a row. All ranks stop after the same step.

    A hook before this one, such as Evaluation, must report the metric. Steps without the metric do not count. Rank 0's
    value decides for all ranks. NaN is never better. A checkpoint holds the best value, its step and the count.

    Attributes:
        best: the best value so far. None before the first value.
        best_step: the step with the best value.
    """

    ends_run = True

    def __init__(self, metric: str, *, patience: int, goal: str = "min", margin: float = 0.0) -> None:
        """
        Args:
            metric: the name of the metric.
            patience: stop after this many values in a row that are not better, 1 or more.
            goal: "min": smaller is better. "max": larger is better.
            margin: a value is better only if it differs from the best by more than this, 0 or more.

        Raises:
            ConfigError: a value is not allowed.
        """
        if goal not in ("min", "max"):
            raise ConfigError(f"EarlyStopping({metric!r}): goal={goal!r}; allowed are min and max")
        if patience < 1 or not 0 <= margin < float("inf"):
            raise ConfigError(
                f"EarlyStopping({metric!r}): patience={patience}, margin={margin}; allowed: a patience of at least 1, "
                "a finite margin of at least 0"
            )
        self._metric, self._patience, self._margin = metric, patience, margin
        self._sign = 1.0 if goal == "max" else -1.0
        self._seen: set[str] = set()
        self.best: float | None = None
        self.best_step = 0
        self._num_worse = 0

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook. A run that this hook ended does not continue when the script is started again."""
        if self._num_worse >= self._patience:
            self._seen.add(self._metric)
            stop(trainer, f"step {trainer.step_number}: had stopped early")

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        value = shared_metric(trainer, self._metric, self._seen)
        if value is None:
            return
        if value == value and (self.best is None or self._sign * (value - self.best) > self._margin):
            self.best, self.best_step, self._num_worse = value, step.number, 0
            return
        self._num_worse += 1
        if self._num_worse >= self._patience:
            best = "was never a number" if self.best is None else f"was best at step {self.best_step} ({self.best:.6g})"
            stop(trainer, f"step {step.number}: stopped early, {self._metric} {best}")

    def after_run(self, trainer: Trainer) -> None:
        """See Hook."""
        say_unseen(trainer, "EarlyStopping", self._metric, self._seen)

    def state(self) -> dict[str, Any]:
        """See Hook."""
        return {"best": self.best, "best_step": self.best_step, "num_worse": self._num_worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Hook."""
        try:
            best = None if state["best"] is None else float(state["best"])
            best_step, num_worse = int(state["best_step"]), int(state["num_worse"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of EarlyStopping is {dict(state)}; was it written by mpitrain?"
            ) from error
        self.best, self.best_step, self._num_worse = best, best_step, num_worse
