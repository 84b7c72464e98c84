"""Rounds: ranks train by themselves, and exchange their parameters once in a round of many steps.

    step           1   2   3  ...  sync_every     sync_every + 1
    rank 0         ──────────────────┐  outer  ┌──────────────
    rank 1         ──────────────────┴─ step ──┴──────────────

In between, ranks send each other only 80 bytes a step: samples, losses, and whether a gradient cannot be used. The
parameters may be cut into fragments, each with its own outer step, which may arrive some steps later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array, is_device_array
from mpitrain.compression import power_sgd
from mpitrain.errors import ConfigError, NonFiniteError, everywhere
from mpitrain.exchange.alone import AloneExchange
from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.flat_ranges import cut
from mpitrain.strategies.fragments import Fragment, finish_all
from mpitrain.strategies.round_plan import RoundPlan
from mpitrain.strategies.round_state import RoundState
from mpitrain.strategies.sync import Sync
from mpitrain.training.checkpoint.names import host_copy
from mpitrain.training.optimizers import Optimizer, described
from mpitrain.world import World

# A rank's gradients go nowhere, so there is no reason to cut them into buckets.
_ONE_BUCKET = 2**62


class Rounds:
    """The common part of the strategies of rounds, which describe the arguments; see Strategy."""

    def __init__(
        self,
        sync_every: int,
        *,
        warm_up: int = 0,
        exchange: Callable[[World], Exchange],
        outer: Optimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        by_rank: bool = False,
    ) -> None:
        """`by_rank`: in an outer step, each rank sends for itself, also to the others of its node."""
        self._plan = RoundPlan(type(self).__name__, sync_every, warm_up, fragments, delay, alpha)
        self._exchange, self._outer, self._by_rank = exchange, outer, by_rank

    @property
    def keeps_own_state(self) -> bool:
        """See Strategy: what is under way is in this rank's parameters too. In the warm-up, it is as with Sync."""
        return not self._is_warming_up

    @property
    def replicas_are_equal(self) -> bool:
        """See Strategy: False within a round."""
        return not any(fragment.is_apart or fragment.flying for fragment in self._fragments)

    @property
    def trains_alone(self) -> bool:
        """See Strategy: the next step is not one of the warm-up."""
        return not self._is_warming_up

    @property
    def num_outer_steps(self) -> int:
        """See Strategy. Each fragment has its own."""
        return sum(fragment.num_updates for fragment in self._fragments)

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters.

        Raises:
            MismatchError: the ranks differ in the arguments or in the model. Raised on every rank.
            ConfigError: there are more fragments than trained elements, or the setting of the World's compression is
                power_sgd. Raised on every rank.
        """
        setting = world.config.compression
        if self._exchange is make_exchange and setting.partition(":")[0] == power_sgd.NAME:
            raise everywhere(
                ConfigError(
                    f"compression={setting}: an outer step exchanges ranges of all parameters, which have no matrices "
                    "that power_sgd could send as products. Take a codec, such as int8, or train with mt.Sync"
                )
            )
        self._world, self._adapter, self._scale = world, adapter, adapter.loss_scale
        outer = described(self._outer) if self._outer else "none"
        world.agree("begin", [str(self._plan), f"outer optimizer {outer}"])
        parts = cut(adapter, self._plan.fragments)
        self._sync = Sync(self._exchange) if self._plan.warm_up else None
        if self._sync:
            self._sync.begin(world, adapter)
        elif world.size > 1:
            adapter.load_parameters(world.sync(adapter.parameters()))
        self._alone = AloneExchange(world)
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        self._inner = GradientReducer(
            world,
            adapter.layout,
            exchange=lambda _: self._alone,
            bucket_bytes=_ONE_BUCKET,
            threaded=False,
            on_device=on_device,
        )
        between = replace(world, node_ranks=tuple(range(world.size))) if self._by_rank else world
        self._fragments = [
            Fragment(between, adapter, pieces, offset, self._outer, self._exchange)
            for pieces, offset in zip(parts, self._plan.offsets, strict=True)
        ]
        self._states = RoundState(world, adapter, self._plan, self._fragments)
        self._left_to_warm_up = self._plan.warm_up
        self._steps = 0  # of the present round
        self._is_resumed = False  # True: the ranks have not yet counted the samples that a resume has left them

    def begin_step(self, weight: float) -> None:
        """See Strategy. Fragments that are sent with a delay start here, from what the ranks have committed."""
        if self._is_warming_up:
            assert self._sync
            self._sync.begin_step(weight)
            return
        self._count_resumed()
        if self.replicas_are_equal and not self._is_plain:
            for fragment in self._fragments:
                fragment.note()
        if self._plan.delay:
            for fragment in self._due(self._steps or self._plan.sync_every):
                fragment.start(self._plan.delay)
        self._weight = weight
        self._alone.loss_scale = self._scale.value if self._scale else 1.0
        self._inner.begin(weight, self._alone.loss_scale)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        if self._is_warming_up:
            assert self._sync
            self._sync.on_gradient(index, gradient)
        else:
            self._inner.ready(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy. The loss is the mean over all ranks, each with the parameters that it has."""
        if self._is_warming_up:
            assert self._sync
            made = self._sync.finish_step(adapter, loss)
            self._left_to_warm_up -= 1
            return made
        may_skip = self._scale is not None and self._scale.may_skip
        means = self._inner.finish(loss, may_skip=may_skip, note=adapter.note())
        flying = [fragment for fragment in self._fragments if fragment.flying]
        arriving = [fragment for fragment in flying if fragment.steps_left == 1]
        finish_all(arriving)
        if self._is_plain:
            self._world.commit()
            rate = self._apply(means)
        elif due := [] if self._plan.delay else self._due(self._steps + 1):
            rate = self._apply_and_meet(means, due)
        else:
            self._world.commit()
            rate = self._apply(means)
            self._count(means)
        for fragment in flying:
            fragment.steps_left -= 1
        for fragment in arriving:
            fragment.update(self._plan.alpha)
        self._steps = 0 if self._is_plain else (self._steps + 1) % self._plan.sync_every
        if self._scale:
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def end_run(self) -> None:
        """See Strategy. The round ends here, with all that is under way.

        Raises:
            NonFiniteError: see Fragment.finish. The round goes on.
        """
        self._count_resumed()
        if self.replicas_are_equal:
            return
        for fragment in self._fragments:
            with suppress(NonFiniteError):  # it is sent again, and then the error is raised
                fragment.finish()
            fragment.forget()
        for fragment in self._fragments:
            fragment.start(0)
        finish_all(self._fragments)
        self._world.commit()
        for fragment in self._fragments:
            if fragment.flying:
                fragment.update(0.0)
            elif fragment.is_apart:  # all steps since its last outer step were skipped
                fragment.go_back()
        self._steps = 0

    @property
    def _is_plain(self) -> bool:
        """One rank trains, and begins no round, since its end would change nothing."""
        return self._world.size == 1 and self._outer is None and all(fragment.is_idle for fragment in self._fragments)

    @property
    def _is_warming_up(self) -> bool:
        return self._left_to_warm_up > 0

    def _due(self, steps: int) -> list[Fragment]:
        """The fragments that are sent when so many steps of a round have been made."""
        return [fragment for fragment in self._fragments if fragment.offset == steps]

    def _apply(self, means: Means) -> float:
        return self._adapter.apply_gradients(self._inner.flats, means.remarks) if means.is_finite else 0.0

    def _count(self, means: Means) -> None:
        if means.is_finite:
            for fragment in self._fragments:
                fragment.count(self._weight, means.weight)

    def _count_resumed(self) -> None:
        """Count the samples of all ranks after a resume: parts of ranks may have been lost. Collective then."""
        if not self._is_resumed:
            return
        weights = numpy.array([fragment.weight for fragment in self._fragments])
        for fragment, total in zip(self._fragments, self._world.sum(weights).tolist(), strict=True):
            fragment.expect(total)
        self._is_resumed = False

    def _apply_and_meet(self, means: Means, due: Sequence[Fragment]) -> float:
        """Make the last step before an outer step, and the outer step, with one commit. Return the learning rate."""
        # Only this step shows whether the ranks can meet after it. If they cannot, nothing has changed.
        before = host_copy(self._adapter.state())
        counts = [fragment.counts for fragment in self._fragments]
        try:
            self._count(means)
            rate = self._apply(means)
            for fragment in due:
                fragment.start(0)
            finish_all(due)
            self._world.commit()
        except Exception:
            self._adapter.restore(before)
            for fragment, its_counts in zip(self._fragments, counts, strict=True):
                fragment.forget()
                fragment.counts = its_counts
            raise
        for fragment in due:
            fragment.update(0.0)
        return rate

    # -- checkpoints: see round_state.py ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See Strategy: `outer` if there is an outer optimizer, `round` in the middle of one, `warm_up` in that."""
        state: dict[str, Any] = {}
        if self._is_warming_up:
            state["warm_up"] = self._left_to_warm_up
        if self._outer:
            state["outer"] = self._states.outer()
        if self._steps or not self.replicas_are_equal:
            state["round"] = self._states.round(self._steps)
        return state

    def check(self, state: dict[str, Any]) -> None:
        """See Strategy.

        Raises:
            CheckpointError: the state belongs to other parameters, other fragments, or a longer round.
        """
        self._states.check(state)

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. A state of Sync, {}, begins a round, without a warm-up. Raises what `check` raises."""
        self._states.check(state)
        self._states.restore(state)
        self._left_to_warm_up = state.get("warm_up", 0) if self._sync else 0
        self._steps = state.get("round", {}).get("steps", 0)
        self._is_resumed = True

    def own_state(self) -> dict[str, Any]:
        """See Strategy: parameters and optimizer of this rank, and what they add to the outer steps: `residual`.

        What is under way arrives first, so that the state is complete.
        """
        if self._is_warming_up:
            assert self._sync
            return self._sync.own_state()
        if not self._world.control.is_broken:
            finish_all(self._fragments)
        if self._world.size == 1 and all(fragment.is_idle for fragment in self._fragments):
            return {}
        return self._states.own()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy. With other ranks than before, all begin with the parameters of the last outer step.

        What the ranks before had learned since then goes into the next outer step.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        if self._is_warming_up:
            assert self._sync
            self._sync.restore_own(state)
            return
        self._states.restore_own(state)
        self._is_resumed = True

    def close(self) -> None:
        """See Strategy."""
        self._inner.close()
        for fragment in self._fragments:
            if not self._world.control.is_broken:
                fragment.drop()
            fragment.close()
        if self._sync:
            self._sync.close()
