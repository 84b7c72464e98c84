"""What happens around the steps. Every hook runs on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpitrain.training.trainer import Step, Trainer


class Hook:
    """Empty methods; a hook overrides those it needs. They may make collective calls: all ranks are there."""

    def before_run(self, trainer: Trainer) -> None:
        """Once, before the first step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """After every step."""

    def after_run(self, trainer: Trainer) -> None:
        """Once, after the last step; not after an error."""
