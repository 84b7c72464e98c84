"""How a Trainer is watched for `mpitrain verify`: its data, its adapter and its hooks are seen through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array
from mpitrain.exchange.bucket import plan_layout
from mpitrain.training.hooks.evaluate import Evaluate
from mpitrain.training.hooks.hook import Hook
from mpitrain.tree import Tree
from mpitrain.verify.record import STEP, Recorder
from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.training.trainer import Data, Parts, Step, Trainer


def observed(world: World, parts: Parts, hooks: Sequence[Hook]) -> tuple[Parts, tuple[Hook, ...]]:
    """The same parts, watched, and the hooks without those that write files; unchanged where nothing is verified."""
    recorder = world.observer
    if recorder is None:
        return parts, tuple(hooks)
    assert isinstance(recorder, Recorder)
    recorder.attach()
    silent = [hook for hook in hooks if not hook.writes_files]
    for hook in hooks:
        if hook.writes_files:
            world.print(f"mpitrain verify: without the hook {type(hook).__name__}, which reads or writes files")
    data, adapter = _ObservedData(parts.data, recorder), _ObservedAdapter(parts.adapter)
    watch = _Watch(recorder, data, adapter, [hook for hook in silent if isinstance(hook, Evaluate)])
    return replace(parts, data=cast("Data", data), adapter=cast(Adapter, adapter)), (*silent, watch)


class _ObservedData:
    def __init__(self, data: Data, recorder: Recorder) -> None:
        self._data = data
        self._recorder = recorder
        self.weight = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __next__(self) -> tuple[Tree, int]:
        batch, weight = next(self._data)
        self._recorder.saw(batch)
        self.weight += weight
        return batch, weight


class _ObservedAdapter:
    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.means: dict[str, Array] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array]) -> float:
        """See Adapter. The mean gradients are kept: the optimizer may overwrite them."""
        layout = plan_layout(self._adapter.layout)
        names = (parameter.name for parameter in layout.parameters)
        copies = {dtype: flat.copy() for dtype, flat in flats.items()}
        self.means = dict(zip(names, layout.views(copies), strict=True))
        return self._adapter.apply_gradients(flats)


class _Watch(Hook):
    """The last hook: it writes down the step, and ends the script after the last one."""

    def __init__(
        self, recorder: Recorder, data: _ObservedData, adapter: _ObservedAdapter, evaluations: Sequence[Evaluate]
    ) -> None:
        self._recorder, self._data, self._adapter, self._evaluations = recorder, data, adapter, evaluations

    def before_run(self, trainer: Trainer) -> None:
        """See Hook. What ends the run may be of before it."""
        last = trainer.step_number + self._recorder.steps_left
        if trainer.last_step is not None or any(hook.ends_run for hook in trainer.hooks):
            trainer.last_step = min(trainer.last_step or last, last)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        metrics: dict[str, float] = {}
        for hook in self._evaluations:
            metrics |= hook.results.get(step.number, {})
        self._recorder.add(
            STEP,
            self._data.weight,
            self._adapter.means,
            precision=str(trainer.adapter.precision),
            loss=step.loss,
            learning_rate=step.learning_rate,
            metrics=metrics,
        )
        self._data.weight, self._adapter.means = 0.0, {}

    def after_run(self, trainer: Trainer) -> None:
        """See Hook."""
        self._recorder.end_if_done()
