"""The base class of hooks, which act around the steps. Every hook runs on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError

if TYPE_CHECKING:
    from mpitrain.training.run_event import RunEvent
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Hook:
    """The base class of hooks. Its methods are empty; a hook overrides those that it needs.

    All ranks run the methods, so the methods may make collective calls. Put hooks that measure (Evaluation) before
    hooks that decide (StopWhen) or store (Record).

    Attributes:
        keeps_state: this hook saves and restores the others. Its `before_run` comes first, its `after_step` last.
        writes_files: this hook reads or writes files of the user. `mpitrain verify` runs the training without it.
        ends_run: this hook ends the run at some point, so no StopAtStep is needed.
    """

    keeps_state = False
    writes_files = False
    ends_run = False

    def before_run(self, trainer: Trainer) -> None:
        """Called once, before the first step, and again if a rank is lost during these calls."""

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """Return whether this hook may read or change parameters or the optimizer in its methods for this step.

        Called in a job with several servers, before `before_step` and `after_step`. If the result is True, the first
        server fetches the parts of all servers. A hook that returns False at steps where it does not read the model
        saves time.
        """
        return True

    def before_step(self, trainer: Trainer) -> None:
        """Called before every step. `trainer.step_number` counts the steps so far, including those before a resume."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Called after every step."""

    def world_changed(self, trainer: Trainer) -> None:
        """Called in a run after Trainer.rebuild, and after the loss of a rank.

        `trainer.world` and its parts are new. Rank and size may be new too.
        """

    def went_on(self, trainer: Trainer, event: RunEvent) -> None:
        """Called when the training has continued after a fault or a command, before the next call of another method.

        Not collective. Called once for each event, on every rank.
        """

    def after_run(self, trainer: Trainer) -> None:
        """Called once, after the last step, and again if a rank is lost during these calls. Not called after an
        error."""

    def before_end(self, trainer: Trainer, step: Step) -> None:
        """Called after `step` if the job is to end there, before the end of the run. Save what must not be lost.

        There are two cases: a rank of a job that may restart got SIGTERM, and too few hosts would remain; or hosts were
        lost, and too few remain. In the second case this process has made no step. Only the number of `step` is known:
        loss and learning rate are NaN, `samples` is 0. Called on every rank. `after_run` is not called then.
        """

    def save_now(self, trainer: Trainer, step: Step) -> None:
        """Called on every rank after `after_step` of all hooks, if `mpitrain tell JOB save` requests a save of
        `step`."""

    def close(self) -> None:
        """Called once, at the very end, also after an error. Close files here. Not collective."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: nested dicts of numbers, strings and arrays, or {}. Not collective."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, before the first step. Not called if the checkpoint has no such state.

        Raises:
            CheckpointError: `state` is not a state of this hook.
        """


def by_name(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Return the hooks by name: the first of a class is EarlyStopping, the second EarlyStopping 2."""
    named: dict[str, Hook] = {}
    for hook in hooks:
        kind = type(hook).__name__
        number = 1 + sum(type(other).__name__ == kind for other in named.values())
        named[kind if number == 1 else f"{kind} {number}"] = hook
    return named


def states_of(hooks: Sequence[Hook]) -> dict[str, dict[str, Any]]:
    """Return the states of those hooks that have one, by name."""
    return {name: state for name, hook in by_name(hooks).items() if (state := hook.state())}


def restore_all(hooks: Sequence[Hook], states: Mapping[str, dict[str, Any]]) -> None:
    """Reverse `states_of`. A hook without a state does not change; a state without a hook is ignored."""
    for name, hook in by_name(hooks).items():
        if name in states:
            hook.restore(states[name])


def refuse_others(hooks: Sequence[object]) -> None:
    """Raise ConfigError unless all objects are hooks."""
    for number, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            kind = f"the class {hook.__name__}" if isinstance(hook, type) else f"a {type(hook).__name__}"
            raise ConfigError(
                f"hooks[{number}] of Trainer is {kind}; it must be a Hook. Put a writer or meter into "
                "mt.Record, as in hooks=[mt.Record([mt.writers.JsonLines(directory)])]"
            )
