"""sync: every step uses the mean gradient of all ranks, so n ranks compute what one rank would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array, is_device_array
from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.of_rounds import refuse_round, without_rounds
from mpitrain.world import World


class Sync:
    """Synchronous data parallelism; see Strategy for the calls."""

    def __init__(self, exchange: Callable[[World], Exchange] = make_exchange) -> None:
        """`exchange` makes the object that computes the means, for a World."""
        self.exchange = exchange

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters."""
        self._world = world
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        self._reducer = GradientReducer(world, adapter.layout, exchange=self.exchange, on_device=on_device)
        self._scale = adapter.loss_scale
        if world.size > 1:
            adapter.load_parameters(world.sync(adapter.parameters()))

    def begin_step(self, weight: float) -> None:
        """See Strategy."""
        self._reducer.begin(weight, self._scale.value if self._scale else 1.0)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        self._reducer.ready(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy."""
        may_skip = self._scale is not None and self._scale.may_skip
        means = self._reducer.finish(loss, may_skip=may_skip, note=adapter.note())
        self._world.commit()
        rate = adapter.apply_gradients(self._reducer.flats, means.remarks) if means.is_finite else 0.0
        if self._scale:
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def end_run(self) -> None:
        """See Strategy. The replicas are equal."""

    def state(self) -> dict[str, Any]:
        """See Strategy: `factors`, if compression goes on from those of the last step."""
        factors = self._reducer.factors()
        return {"factors": factors} if factors else {}

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. What an outer optimizer has kept is left out.

        Raises:
            CheckpointError: the state is from the middle of a round of LocalSGD or DiLoCo.
        """
        refuse_round(state)
        self._reducer.restore_factors(state.get("factors", {}))

    def own_state(self) -> dict[str, Any]:
        """See Strategy. The state is what a codec has left out."""
        return self._reducer.state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy."""
        self._reducer.restore(without_rounds(state))

    def close(self) -> None:
        """See Strategy."""
        self._reducer.close()
