"""Ends of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.trainer import Trainer


class StopAtStep(Hook):
    """End the run after step `number`, counted from the start of training, also across a resume."""

    def __init__(self, number: int) -> None:
        if number < 1:
            raise ConfigError(f"StopAtStep({number}): the last step is at least 1")
        self._number = number

    def before_run(self, trainer: Trainer) -> None:
        """See Hook. Where several hooks stop, the earliest one does."""
        trainer.last_step = min(self._number, trainer.last_step or self._number)
