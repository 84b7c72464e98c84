"""Computes metrics at regular intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


_MOST_RESULTS = 10_000


class Evaluation(Hook):
    """Compute metrics every `steps` steps, and after the last step if the hook that ends the run comes before this one.

    This hook reports the metrics to the hooks that follow, and rank 0 prints them.

    Attributes:
        results: the metrics of the last 10,000 evaluations by step, on every rank.
    """

    def __init__(self, steps: int, metrics: Callable[[Trainer], Mapping[str, float]]) -> None:
        """
        Args:
            steps: the number of steps between two evaluations.
            metrics: is called with the Trainer on every rank. It returns values by name, the same on every rank, as
                `mpitrain.evaluate` does.

        Raises:
            ConfigError: `steps` is below 1.
        """
        if steps < 1:
            raise ConfigError(f"Evaluation every {steps} steps: the number must be at least 1")
        self._steps = steps
        self._metrics = metrics
        self.results: dict[int, dict[str, float]] = {}

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return step % self._steps == 0 or step == trainer.last_step

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if step.number % self._steps and step.number != trainer.last_step:
            return
        values = dict(self._metrics(trainer))
        self.results[step.number] = values
        if len(self.results) > _MOST_RESULTS:
            del self.results[next(iter(self.results))]
        trainer.report(values)
        text = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        trainer.world.print(f"step {step.number}: {text}")
