"""What the exchange of gradients costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Communication(Meter):
    """What the exchange of gradients costs, over the row's steps and all ranks.

    `communication_share`: of the steps' time, what they waited for the exchange (also for a rank that is slower).
    `wire_seconds`: how long gradients of a step were on their way. `wire_hidden_share`: what of that was behind the
    computation.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps, self._seconds, self._exposed, self._wire = 0, 0.0, 0.0, 0.0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._steps += 1
        self._seconds += step.seconds
        self._exposed += step.overlap.exposed_seconds
        self._wire += step.overlap.wire_seconds

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter. A share's mean by its own time is the share of all ranks' times together."""
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
