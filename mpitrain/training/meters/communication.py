"""Measures the cost of exchanging gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Communication(Meter):
    """The cost of exchanging gradients, over the steps of the row and all ranks.

    `communication_share`: the share of the steps' time in which they waited for the exchange, or for a slower rank.
    `wire_seconds`: the time that the gradients of a step were under way. `wire_hidden_share`: the share of this time
    that was hidden behind the computation.
    """

    reads_model = False

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps, self._seconds, self._exposed, self._wire = 0, 0.0, 0.0, 0.0

    def start(self, trainer: Trainer) -> str:
        """See Meter."""
        return "it is a server, which exchanges nothing with ranks; take Workers" if trainer.served else ""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._steps += 1
        self._seconds += step.seconds
        self._exposed += step.overlap.exposed_seconds
        self._wire += step.overlap.wire_seconds

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter. The mean of the shares, weighted by time, is the share of the time of all ranks."""
        if not self._steps:
            return {}
        readings = {
            "communication_share": Reading(self._exposed / self._seconds, self._seconds),
            "wire_seconds": Reading(self._wire / self._steps),
        }
        if self._wire:
            readings["wire_hidden_share"] = Reading(max(0.0, 1 - self._exposed / self._wire), self._wire)
        self._clear()
        return readings
