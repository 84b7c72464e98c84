"""sync: every step uses the mean gradient of all ranks, so n ranks compute what one rank would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array
from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.exchange.reducer import GradientReducer, Means
from mpitrain.world import World


class Sync:
    """Synchronous data parallelism; see Strategy for the calls."""

    def __init__(self, exchange: Callable[[World], Exchange] = make_exchange) -> None:
        """`exchange` makes what makes the means, for a World."""
        self._exchange = exchange

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters."""
        self._reducer = GradientReducer(world, adapter.layout, exchange=self._exchange)
        if world.size > 1:
            adapter.load_parameters(world.sync(adapter.parameters()))

    def begin_step(self, weight: float) -> None:
        """See Strategy."""
        self._reducer.begin(weight)

    def on_gradient(self, index: int, gradient: Array) -> None:
        """See Strategy."""
        self._reducer.ready(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy."""
        means = self._reducer.finish(loss)
        return means, adapter.apply_gradients(self._reducer.flats)

    def state(self) -> dict[str, Any]:
        """See Strategy. Nothing is kept: what a codec left out belongs to a rank, and is worth one step's rounding."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy."""
