"""Recording a Trainer for `mpitrain verify`: the recorder gets batches and means; a hook ends each line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpitrain.strategies.strategy import refuse_stages
from mpitrain.training.hooks.evaluation import Evaluation
from mpitrain.training.hooks.hook import Hook
from mpitrain.verify.run_record import TRAINER, Recorder
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


def observed(world: World, hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    """Under verify and plan, leave out the hooks that write files; under verify, add one that records.

    Otherwise return the same hooks.
    """
    if not world.rehearsal:
        return tuple(hooks)
    silent = [hook for hook in hooks if not hook.writes_files]
    for hook in hooks:
        if hook.writes_files:
            world.print(f"{world.rehearsal}: leaving out the hook {type(hook).__name__}, which reads or writes files")
    recorder = world.observer
    if recorder is None:
        return tuple(silent)
    assert isinstance(recorder, Recorder)
    recorder.attach(TRAINER)
    return (*silent, _Watch(recorder, [hook for hook in silent if isinstance(hook, Evaluation)]))


class _Watch(Hook):
    """The last hook: it records each step, and ends the script after the last step."""

    def __init__(self, recorder: Recorder, evaluations: Sequence[Evaluation]) -> None:
        self._recorder, self._evaluations = recorder, evaluations
        self._alone = False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook. The exception that ends the run may be older than the run.

        Raises:
            ConfigError: the ranks have different layers. Raised on every rank.
        """
        refuse_stages(
            trainer.strategy,
            "mpitrain verify compares the samples and parameters of all ranks with those of one, but with "
            "Pipeline the ranks have different layers. Use one stage for the comparison",
        )
        last = trainer.step_number + self._recorder.steps_left
        if trainer.last_step is not None or any(hook.ends_run for hook in trainer.hooks):
            trainer.last_step = min(trainer.last_step or last, last)

    def before_step(self, trainer: Trainer) -> None:
        """See Hook."""
        self._alone = trainer.strategy.trains_alone
        self._recorder.begin_step(trainer.adapter.parameters())

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        metrics: dict[str, float] = {}
        for hook in self._evaluations:
            metrics |= hook.results.get(step.number, {})
        self._recorder.add_step(
            float(step.own_samples),
            parameters=trainer.adapter.parameters(),
            precision=str(trainer.adapter.precision),
            loss=step.loss,
            learning_rate=step.learning_rate,
            metrics=metrics,
            alone=self._alone,
        )

    def after_run(self, trainer: Trainer) -> None:
        """See Hook."""
        self._recorder.end_if_done()
