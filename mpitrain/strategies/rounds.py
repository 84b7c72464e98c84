"""Rounds: ranks train by themselves, and exchange their parameters once in a round of many steps; see meetings.py.

In between, ranks send each other only 80 bytes a step: samples, losses, and whether a gradient cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.adapters.adapter import Adapter, LocalModel
from mpitrain.arrays import Array, is_device_array
from mpitrain.exchange.alone import AloneExchange
from mpitrain.exchange.exchange import Exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.meetings import Meetings
from mpitrain.strategies.round_plan import RoundPlan
from mpitrain.strategies.sync import Sync
from mpitrain.training.optimizers import Optimizer
from mpitrain.world import World

# A rank's gradients go nowhere, so there is no reason to cut them into buckets.
ONE_BUCKET = 2**62


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
        self.plan = RoundPlan(type(self).__name__, sync_every, warm_up, fragments, delay, alpha)
        self._exchange, self._outer, self._by_rank = exchange, outer, by_rank

    def meetings(self, world: World, model: LocalModel) -> Meetings:
        """Return the outer steps of a loop that makes its steps itself, such as that of mpitrain.torch.prepare.

        Collective. Raises what Meetings raises.
        """
        return Meetings(world, model, self.plan, self._outer, self._exchange, by_rank=self._by_rank)

    @property
    def keeps_own_state(self) -> bool:
        """See Strategy: what is under way is in this rank's parameters too. In the warm-up, it is as with Sync."""
        return not self._is_warming_up

    @property
    def replicas_are_equal(self) -> bool:
        """See Strategy: False within a round."""
        return self._meetings.replicas_are_equal

    @property
    def trains_alone(self) -> bool:
        """See Strategy: the next step is not one of the warm-up."""
        return not self._is_warming_up

    @property
    def num_outer_steps(self) -> int:
        """See Strategy. Each fragment has its own."""
        return self._meetings.num_outer_steps

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters. Raises what Meetings raises."""
        self._world, self._adapter, self._scale = world, adapter, adapter.loss_scale
        self._meetings = self.meetings(world, adapter)
        # Not make_exchange itself: with compression=auto, the profile chooses for outer steps, so also for the warm-up.
        self._sync = Sync(partial(self._exchange)) if self.plan.warm_up else None
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
            bucket_bytes=ONE_BUCKET,
            threaded=False,
            on_device=on_device,
        )
        self._left_to_warm_up = self.plan.warm_up

    def begin_step(self, weight: float) -> None:
        """See Strategy. See Meetings.begin_step."""
        if self._is_warming_up:
            assert self._sync
            self._sync.begin_step(weight)
            return
        self._meetings.begin_step()
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
        samples = (self._weight, means.weight) if means.is_finite else (0.0, 0.0)
        with self._meetings.around_update(*samples):
            rate = adapter.apply_gradients(self._inner.flats, means.remarks) if means.is_finite else 0.0
        if self._scale:
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def end_run(self) -> None:
        """See Strategy. The round ends here; see Meetings.end_round."""
        self._meetings.end_round()

    @property
    def _is_warming_up(self) -> bool:
        return self._left_to_warm_up > 0

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See Strategy: that of Meetings, and `warm_up` in that."""
        warm_up = {"warm_up": self._left_to_warm_up} if self._is_warming_up else {}
        return {**warm_up, **self._meetings.state()}

    def check(self, state: dict[str, Any]) -> None:
        """See Strategy. Raises what Meetings.check raises."""
        self._meetings.check(state)

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. A state of Sync, {}, begins a round, without a warm-up. Raises what `check` raises."""
        self._meetings.restore(state)
        self._left_to_warm_up = state.get("warm_up", 0) if self._sync else 0

    def own_state(self) -> dict[str, Any]:
        """See Strategy, and Meetings.own_state."""
        if self._is_warming_up:
            assert self._sync
            return self._sync.own_state()
        return self._meetings.own_state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy, and Meetings.restore_own."""
        if self._is_warming_up:
            assert self._sync
            self._sync.restore_own(state)
            return
        self._meetings.restore_own(state)

    def close(self) -> None:
        """See Strategy."""
        self._inner.close()
        self._meetings.close()
        if self._sync:
            self._sync.close()
