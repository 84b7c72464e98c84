"""The loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Loss(Meter):
    """`loss`: the mean over all samples of the steps of the row. The loss of a step is already the mean over ranks."""

    reads_model = False

    def __init__(self) -> None:
        self._sum = self._samples = 0.0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._sum += step.loss * step.samples
        self._samples += step.samples

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        reading = Reading(self._sum / self._samples, over_ranks="root")
        self._sum = self._samples = 0.0
        return {"loss": reading}

    def state(self) -> dict[str, Any]:
        """See Meter. So the next row of a resumed run includes the steps before the checkpoint."""
        return {"sum": self._sum, "samples": self._samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Meter."""
        self._sum, self._samples = float(state["sum"]), float(state["samples"])
