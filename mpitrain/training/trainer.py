"""Trainer: only loops. What is trained, on what, and how ranks work together, comes from `build`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpitrain.adapters.adapter import Adapter
from mpitrain.cuda.shortage import memory_explained
from mpitrain.cuda.streams import wait_for_work
from mpitrain.errors import CheckpointError, ConfigError, NonFiniteError
from mpitrain.exchange.overlap import Overlap
from mpitrain.launch.steps import reporter
from mpitrain.start import init
from mpitrain.strategies import Strategy
from mpitrain.training.hooks.hook import Hook
from mpitrain.training.non_finite import located
from mpitrain.tree import Tree
from mpitrain.verify.observe import observed
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
    """What one step did; the same on every rank, but for `seconds`, `overlap` and what is its own.

    Attributes:
        number: steps made since the start of training, this one included.
        loss: mean over the samples of all ranks, before the update.
        samples: of all ranks together.
        learning_rate: that was used; 0 where the step was skipped.
        seconds: this rank's wall time for the step.
        overlap: what of it the exchange took on this rank, and how much of the exchange was hidden.
        loss_scale: that the gradients of this step were multiplied by; None without one.
        skipped: the loss scale made a gradient infinite, so parameters and optimizer stayed as they were.
        own_samples: of this rank.
        own_seconds: that this rank took for its batch and gradients, without what it waited for others; on a GPU
            only while `Trainer.times_own_work`.
    """

    number: int
    loss: float
    samples: float
    learning_rate: float
    seconds: float
    overlap: Overlap
    loss_scale: float | None = None
    skipped: bool = False
    own_samples: int = 0
    own_seconds: float = 0.0


class Trainer:
    """Runs steps until a hook stops it. Every rank makes the same calls.

    Attributes:
        world, adapter, strategy, data: as built.
        step_number: steps made so far, also before a resume.
        last_step: the number of the step to stop after; None while no hook has set it.
        times_own_work: `Step.own_seconds` is asked for: on a GPU a step then waits for its gradients before the rest
            of their exchange.
        hooks: as given.
        metrics: of the step just made, by name: what hooks gave to `report`.
    """

    def __init__(self, build: Callable[[World], Parts], hooks: Sequence[Hook] = ()) -> None:
        """
        Args:
            build: makes model, strategy and data for a World; called again when the World changes.
            hooks: called in this order after every step (but Checkpoint comes last, before the run first); one of
                them must end the run (see StopAtStep).
        """
        self.world = init()
        with memory_explained():
            parts = build(self.world)
        parts, self.hooks = observed(self.world, parts, hooks)
        self.adapter, self.strategy, self.data = parts.adapter, parts.strategy, parts.data
        self.step_number = 0
        self.last_step: int | None = None
        self.times_own_work = False
        self.metrics: dict[str, float] = {}
        self._report_step = reporter(self.world.config.roll_call, self.world.rank)
        with memory_explained():
            self.strategy.begin(self.world, self.adapter)

    def run(self) -> None:
        """Train until `last_step`.

        Raises:
            ConfigError: no hook ends the run.
            GradientError: a gradient cannot be used. On every rank, with the parameters of the last good step.
        """
        # A checkpoint holds what the other hooks have seen of the step, and they begin with what it held.
        keeping_first = sorted(self.hooks, key=lambda hook: not hook.keeps_state)
        keeping_last = sorted(self.hooks, key=lambda hook: hook.keeps_state)
        try:
            for hook in keeping_first:
                hook.before_run(self)
            if self.last_step is None and not any(hook.ends_run for hook in self.hooks):
                raise ConfigError("nothing ends this run; add the hook StopAtStep(number)")
            while self.last_step is None or self.step_number < self.last_step:
                self.metrics = {}
                for hook in self.hooks:
                    hook.before_step(self)
                step = self.step()
                for hook in keeping_last:
                    hook.after_step(self, step)
            for hook in keeping_first:  # what has been saved is on the disk before another hook can fail
                hook.after_run(self)
        finally:
            for hook in self.hooks:
                hook.close()

    def report(self, metrics: Mapping[str, float]) -> None:
        """Numbers of the step just made, for the hooks that come behind; the same call on every rank.

        Args:
            metrics: by name; the same values on every rank.

        Raises:
            ConfigError: a name that another hook has reported, or that cannot be written in one line. On every rank.
        """
        for name in metrics:
            if name in self.metrics or not name.isprintable():
                error = ConfigError(
                    f"step {self.step_number}: the metric {name!r} was reported; allowed is a printable name that no "
                    f"other hook reports. Reported are {', '.join(self.metrics) or 'none'}; give it another name"
                )
                error.known_everywhere = True
                raise error
        self.metrics.update(metrics)

    def step(self) -> Step:
        """One step: batch, gradients, exchange, update.

        Raises:
            GradientError: as `run`. For NaN and infinity it names rank, parameter and step, and says whether loss,
                batch and parameters were finite on all ranks.
        """
        spans = self.world.control.spans
        started = time.perf_counter()
        self._report_step(self.step_number + 1)
        scale = self.adapter.loss_scale.value if self.adapter.loss_scale else None
        batch, weight = next(self.data)
        if spans:
            spans.add("compute", "data", started, time.perf_counter(), step=self.step_number + 1)
        with memory_explained():
            self.strategy.begin_step(weight)
            loss = self.adapter.loss_and_gradients(batch, self.strategy.on_gradient)
            if self.times_own_work:
                wait_for_work(next(iter(self.adapter.parameters().values())))
            finishing = time.perf_counter()
            own_seconds = finishing - started
            try:
                means, learning_rate = self.strategy.finish_step(self.adapter, loss)
            except NonFiniteError as error:
                raise located(
                    self.world,
                    error,
                    step=self.step_number + 1,
                    batch=batch,
                    loss=loss if weight else 0.0,
                    parameters=self.adapter.parameters(),
                ) from None
        self.step_number += 1
        if spans:
            updating = finishing + means.overlap.exposed_seconds
            spans.add("compute", "update", updating, time.perf_counter(), step=self.step_number)
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
            weight,
            own_seconds,
        )

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs to go on from here, by name and free of ranks.

        What a codec has left out on this rank is not in it: see Strategy.own_state.
        """
        return {
            "step": self.step_number,
            "data": self.data.state(),
            "adapter": self.adapter.state(),
            "strategy": self.strategy.state(),
            "hooks": {name: state for name, hook in _by_name(self.hooks).items() if (state := hook.state())},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; every rank restores the same one.

        A hook that the state does not know begins anew; one that is only in the state is not missed.

        Raises:
            CheckpointError: it was taken from another model or data set, or lacks something. Nothing has changed.
        """
        data, strategy = self.data.state(), self.strategy.state()
        hooks = [(hook, hook.state()) for hook in self.hooks]
        try:
            step = int(state["step"])
            try:
                self.data.restore(state["data"])
                self.strategy.restore(state.get("strategy", {}))
                for name, hook in _by_name(self.hooks).items():
                    if name in state.get("hooks", {}):
                        hook.restore(state["hooks"][name])
                # Last, for it is large: it refuses before it overwrites anything, so it never has to be put back.
                self.adapter.restore(state["adapter"])
            except BaseException:
                self.data.restore(data)
                self.strategy.restore(strategy)
                for hook, before in hooks:
                    hook.restore(before)
                raise
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no entry {error}; was it written by this Trainer?") from error
        self.step_number = step


def _by_name(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """The hooks by their names in a checkpoint: EarlyStopping, and a second one EarlyStopping 2."""
    named: dict[str, Hook] = {}
    for hook in hooks:
        kind = type(hook).__name__
        number = 1 + sum(type(other).__name__ == kind for other in named.values())
        named[kind if number == 1 else f"{kind} {number}"] = hook
    return named
