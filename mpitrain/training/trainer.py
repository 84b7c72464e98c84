"""Trainer: only loops. What is trained, on what, and how ranks work together, comes from `build`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpitrain.adapters.adapter import Adapter
from mpitrain.cuda.shortage import memory_explained
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.exchange.overlap import Overlap
from mpitrain.start import init
from mpitrain.strategies import Strategy
from mpitrain.training.hooks.hook import Hook
from mpitrain.tree import Tree
from mpitrain.world import World


class Data(Protocol):
    """An endless source of batches, such as ArrayData."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def __next__(self) -> tuple[Tree, int]:
        """This rank's part of the next global batch, and its number of samples."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What `build(world)` returns: everything that may hold a communicator, so that all can be built anew."""

    adapter: Adapter
    strategy: Strategy
    data: Data


@dataclass(frozen=True)
class Step:
    """What one step did; the same on every rank, but for `seconds` and `overlap`.

    Attributes:
        number: steps made since the start of training, this one included.
        loss: mean over the samples of all ranks, before the update.
        samples: of all ranks together.
        learning_rate: that was used; 0 where the step was skipped.
        seconds: this rank's wall time for the step.
        overlap: what of it the exchange took on this rank, and how much of the exchange was hidden.
        loss_scale: that the gradients of this step were multiplied by; None without one.
        skipped: the loss scale made a gradient infinite, so parameters and optimizer stayed as they were.
    """

    number: int
    loss: float
    samples: float
    learning_rate: float
    seconds: float
    overlap: Overlap
    loss_scale: float | None = None
    skipped: bool = False


class Trainer:
    """Runs steps until a hook stops it. Every rank makes the same calls.

    Attributes:
        world, adapter, strategy, data: as built.
        step_number: steps made so far, also before a resume.
        last_step: the number of the step to stop after; None while no hook has set it.
    """

    def __init__(self, build: Callable[[World], Parts], hooks: Sequence[Hook] = ()) -> None:
        """
        Args:
            build: makes model, strategy and data for a World; called again when the World changes.
            hooks: called in this order after every step; one of them must end the run (see StopAtStep).
        """
        self.world = init()
        with memory_explained():
            parts = build(self.world)
        self.adapter, self.strategy, self.data = parts.adapter, parts.strategy, parts.data
        self.step_number = 0
        self.last_step: int | None = None
        self._hooks = tuple(hooks)
        with memory_explained():
            self.strategy.begin(self.world, self.adapter)

    def run(self) -> None:
        """Train until `last_step`.

        Raises:
            ConfigError: no hook has set `last_step`.
            GradientError: a gradient cannot be used. On every rank, with the parameters of the last good step.
        """
        for hook in self._hooks:
            hook.before_run(self)
        if self.last_step is None:
            raise ConfigError("nothing ends this run; add the hook StopAtStep(number)")
        while self.step_number < self.last_step:
            step = self.step()
            for hook in self._hooks:
                hook.after_step(self, step)
        for hook in self._hooks:
            hook.after_run(self)

    def step(self) -> Step:
        """One step: batch, gradients, exchange, update."""
        started = time.perf_counter()
        scale = self.adapter.loss_scale.value if self.adapter.loss_scale else None
        batch, weight = next(self.data)
        with memory_explained():
            self.strategy.begin_step(weight)
            loss = self.adapter.loss_and_gradients(batch, self.strategy.on_gradient)
            means, learning_rate = self.strategy.finish_step(self.adapter, loss)
        self.step_number += 1
        seconds = time.perf_counter() - started
        return Step(
            self.step_number,
            means.loss,
            means.weight,
            learning_rate,
            seconds,
            means.overlap,
            scale,
            not means.is_finite,
        )

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs to go on from here, by name and free of ranks."""
        return {
            "step": self.step_number,
            "data": self.data.state(),
            "adapter": self.adapter.state(),
            "strategy": self.strategy.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; every rank restores the same one.

        Raises:
            CheckpointError: it was taken from another model or data set, or lacks something. Nothing has changed.
        """
        data, strategy = self.data.state(), self.strategy.state()
        try:
            step = int(state["step"])
            try:
                self.data.restore(state["data"])
                self.strategy.restore(state.get("strategy", {}))
                # Last, for it is large: it refuses before it overwrites anything, so it never has to be put back.
                self.adapter.restore(state["adapter"])
            except BaseException:
                self.data.restore(data)
                self.strategy.restore(strategy)
                raise
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no entry {error}; was it written by this Trainer?") from error
        self.step_number = step
