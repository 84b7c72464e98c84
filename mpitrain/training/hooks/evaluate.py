"""Metrics every so often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Evaluate(Hook):
    """Metrics every `steps` steps, and after the last one if the hook that ends the run stands before this one.

    They are computed, reported for the hooks behind, and printed by rank 0.
    """

    def __init__(self, steps: int, metrics: Callable[[Trainer], Mapping[str, float]]) -> None:
        """`metrics` is collective and gives the same on every rank; see metrics.evaluate."""
        if steps < 1:
            raise ConfigError(f"Evaluate every {steps} steps: it takes at least 1")
        self._steps = steps
        self._metrics = metrics
        self.results: dict[int, dict[str, float]] = {}

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if step.number % self._steps and step.number != trainer.last_step:
            return
        values = dict(self._metrics(trainer))
        self.results[step.number] = values
        trainer.report(values)
        text = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        trainer.world.print(f"step {step.number}: {text}")
