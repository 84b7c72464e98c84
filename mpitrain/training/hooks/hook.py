"""What happens around the steps. Every hook runs on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.training.run_event import RunEvent
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Hook:
    """The base class of hooks. Its methods are empty; a hook overrides those that it needs.

    All ranks run the methods, so the methods may make collective calls. Put hooks that measure (Evaluate) before hooks
    that decide (StopWhen) or keep (Record).

    Attributes:
        keeps_state: this hook saves and restores the others. Its `before_run` comes first, its `after_step` last.
        writes_files: this hook reads or writes files of the user. `mpitrain verify` runs the training without it.
        ends_run: this hook ends the run at some time, so no StopAtStep is needed.
    """

    keeps_state = False
    writes_files = False
    ends_run = False

    def before_run(self, trainer: Trainer) -> None:
        """Is called once, before the first step; again if a rank is lost in these calls."""

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """Return whether this hook may read or change parameters or the optimizer in its methods for this step.

        Is asked in a job with several servers, before `before_step` and `after_step`. If the answer is yes, the first
        server fetches the parts of all. A hook that does not read the model at every step saves time by saying so.
        """
        return True

    def before_step(self, trainer: Trainer) -> None:
        """Is called before every step. `trainer.step_number` counts the steps so far, also those before a resume."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Is called after every step."""

    def world_changed(self, trainer: Trainer) -> None:
        """Is called in a run after Trainer.rebuild, and after the loss of a rank.

        `trainer.world` and its parts are new. Rank and size may be new too.
        """

    def went_on(self, trainer: Trainer, event: RunEvent) -> None:
        """Is called when the training has gone on after a fault or an order, before the next call of another method.

        Not collective. Is called once for each event, on every rank.
        """

    def after_run(self, trainer: Trainer) -> None:
        """Is called once, after the last step; again if a rank is lost in these calls. Is not called after an error."""

    def before_end(self, trainer: Trainer, step: Step) -> None:
        """Is called after `step` if the job is to end there, before the end of the run. Save what must not be lost.

        A rank of a job with `--restarts` got SIGTERM, and too few hosts would be left; or hosts were lost, and too few
        are left. In the second case this process has made no step. Of `step` only the number is known: loss and
        learning rate are NaN, `samples` is 0. Called on every rank. `after_run` is not called then.
        """

    def save_now(self, trainer: Trainer, step: Step) -> None:
        """Is called after `after_step` of all hooks if `mpitrain tell JOB save` wants `step` saved. On every rank."""

    def close(self) -> None:
        """Is called once, at the very end, also after an error. Close files here. Not collective."""

    def state(self) -> dict[str, Any]:
        """Return what belongs to a checkpoint: nested dicts of numbers, strings and arrays, or {}. Not collective."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, before the first step. Is not called if the checkpoint has no such state.

        Raises:
            CheckpointError: `state` is not a state of this hook.
        """
