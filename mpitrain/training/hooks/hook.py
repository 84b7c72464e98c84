"""What happens around the steps. Every hook runs on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Hook:
    """Empty methods; a hook overrides those it needs. They may make collective calls: all ranks are there.

    Attributes:
        keeps_state: this hook saves and restores the others. So its `before_run` comes first, `after_step` last.
        writes_files: it reads or writes files of the user's: `mpitrain verify` runs the training without it.
        ends_run: it ends the run at some time, so that no StopAtStep is needed.

    Of the others those that measure (Evaluate) stand before those that decide (StopWhen) or keep (Record).
    """

    keeps_state = False
    writes_files = False
    ends_run = False

    def before_run(self, trainer: Trainer) -> None:
        """Once, before the first step."""

    def before_step(self, trainer: Trainer) -> None:
        """Before every step; `trainer.step_number` steps have been made, also before a resume."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """After every step."""

    def world_changed(self, trainer: Trainer) -> None:
        """During a run, after Trainer.rebuild: `trainer.world` and its parts are others. Rank and size may be too."""

    def after_run(self, trainer: Trainer) -> None:
        """Once, after the last step; not after an error."""

    def close(self) -> None:
        """Once, at the very end, also after an error: let go of files. Not collective."""

    def state(self) -> dict[str, Any]:
        """What belongs to a checkpoint: nested dicts of numbers, strings and arrays. Not collective; empty: nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, before the first step. Not called where the checkpoint has nothing for it.

        Raises:
            CheckpointError: it is no state of this hook.
        """
