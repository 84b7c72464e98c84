"""The hook that ends a run that no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.training.hooks.hook import Hook
from mpitrain.training.hooks.stop import say_unseen, shared_metric, stop

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class EarlyStopping(Hook):
    """End the run when a metric has not improved `patience` times in a row. All ranks stop after the same step.

    A hook before this one, such as Evaluate, must report the metric. Steps without the metric do not count. Rank 0's
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
        """See Hook. A run that this hook has ended does not go on when it is started again."""
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
