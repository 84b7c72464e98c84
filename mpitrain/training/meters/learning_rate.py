"""The learning rate, and the loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class LearningRate(Meter):
    """`learning_rate`: the rate of the last step of the row, 0 if the step was skipped.

    With a loss scale also `loss_scale`, and `skipped_steps` since the start of training.
    """

    reads_model = False

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._rate = step.learning_rate

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        values = {"learning_rate": self._rate}
        if scale := trainer.adapter.loss_scale:
            values |= {"loss_scale": scale.value, "skipped_steps": float(scale.skipped_steps)}
        return {name: Reading(value, over_ranks="root") for name, value in values.items()}
