"""The norm of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class GradientNorm(Meter):
    """`gradient_norm`: the 2-norm of the last mean gradient of the row, over all parameters and before clipping.

    The optimizer measures the norm. An optimizer that clips has the norm anyway. Any other one makes an extra pass over
    the gradient, only in the last step of a row. A skipped step has no norm, nor has a last row that ends early.
    """

    reads_model = False

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._skipped = step.skipped

    def before_row(self, trainer: Trainer) -> None:
        """See Meter."""
        trainer.adapter.measure_gradient_norm()

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter. The mean gradient has the same bits on every rank."""
        norm = None if self._skipped else trainer.adapter.gradient_norm()
        return {} if norm is None else {"gradient_norm": Reading(norm, over_ranks="root")}
