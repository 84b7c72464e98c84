"""sync: every step uses the mean gradient of all ranks, so n ranks compute what one rank would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array, is_device_array
from mpitrain.errors import CheckpointError
from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.applied import applied
from mpitrain.strategies.choosing_reducer import ChoosingReducer, no_choice
from mpitrain.strategies.of_rounds import refuse_round, without_rounds
from mpitrain.strategies.virtual_ranks import ComputedPlaces, VirtualRanks, check_virtual_ranks
from mpitrain.world import World


class Sync:
    """Synchronous data parallelism; see Strategy for the calls.

    Attributes:
        exchange: makes the object that computes the means, for a World.
        virtual: the virtual ranks; None: there are none, and each rank computes its part of a batch at once.
        places: where the virtual ranks were computed.
        varies: algorithm and buckets are chosen while it trains; see AutoSync.
    """

    varies = False

    def __init__(
        self,
        exchange: Callable[[World], Exchange] = make_exchange,
        *,
        virtual_ranks: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            exchange: makes the object that computes the means, for a World.
            virtual_ranks: cut every global batch into so many equal parts, and compute the gradients of each part by
                itself. Their exact sum has the same bits on 1 to `virtual_ranks` ranks, if each rank has the same
                number of threads. See docs/same-bits.md.
            seed: of the random numbers of virtual ranks, at least 0.
        """
        self.exchange = exchange
        self.virtual = None if virtual_ranks is None else VirtualRanks(virtual_ranks, seed)
        self.places = ComputedPlaces()

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters.

        With compression=auto, whether bf16 is used is chosen while it trains; see choosing_reducer.py.

        Raises:
            ConfigError: the virtual ranks cannot be divided between the ranks, or gradients cannot be added up exactly.
                Raised on every rank.
        """
        self._world = world
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        exchange, number = self.exchange, None
        if self.virtual:
            check_virtual_ranks(world, self.virtual, has_own_exchange=exchange is not make_exchange)
            exchange, number = partial(make_exchange, reduction="exact"), self.virtual.number
        codecs = self.codecs_for(world)
        reason = no_choice(world, adapter.layout, codecs, varies=self.varies) if codecs else "no choice"
        self._reducer: GradientReducer | ChoosingReducer
        if not reason:
            self._reducer = ChoosingReducer(
                world, adapter.layout, on_device=on_device, codecs=codecs, varies=self.varies
            )
        else:
            if self.varies:
                world.print(f"mpitrain: strategy auto trains as sync: {reason}")
            self._reducer = GradientReducer(
                world, adapter.layout, exchange=exchange, on_device=on_device, virtual_ranks=number
            )
        self._scale = adapter.loss_scale
        if world.size > 1:
            adapter.load_parameters(world.sync(adapter.parameters()))

    def codecs_for(self, world: World) -> Sequence[str]:
        """The codecs of which one is chosen while it trains; the first one to begin with. Empty: nothing is chosen."""
        chooses = world.config.compression == "auto" and self.exchange is make_exchange and self.virtual is None
        return ["none", "bf16"] if chooses else []

    def begin_step(self, weight: float | Sequence[float]) -> None:
        """See Strategy. With virtual ranks, `weight` has the samples of each of this rank's."""
        self._reducer.begin(weight, self._scale.value if self._scale else 1.0)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        self._reducer.ready(index, gradient)

    def next_pass(self, adapter: Adapter, loss: float) -> None:
        """End the pass of a virtual rank with its mean loss. The pass of this rank's next one follows."""
        assert isinstance(self._reducer, GradientReducer)  # virtual ranks leave no choice
        self._reducer.next_pass(loss, adapter.note())

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy."""
        may_skip = self._scale is not None and self._scale.may_skip
        means = self._reducer.finish(loss, may_skip=may_skip, note=adapter.note())
        self._world.commit()
        return means, applied(adapter, self._reducer.flats, means, self._scale)

    def end_run(self) -> None:
        """See Strategy. The replicas are equal."""

    def state(self) -> dict[str, Any]:
        """See Strategy: `factors`, if compression goes on from them; and `virtual`, `places` or `choice`."""
        if isinstance(self._reducer, ChoosingReducer):
            return {"choice": self._reducer.choice()}
        factors = self._reducer.factors()
        state: dict[str, Any] = {"factors": factors} if factors else {}
        if self.virtual:
            state |= {"virtual": self.virtual.state(), "places": self.places.state()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. What an outer optimizer has kept is left out.

        Raises:
            CheckpointError: the state is from the middle of a round of LocalSGD or DiLoCo, or of other virtual
                ranks.
        """
        refuse_round(state)
        if self.virtual and "virtual" in state:
            self.virtual.check(state["virtual"])
            self.places.restore(state.get("places", []))
        if isinstance(self._reducer, ChoosingReducer):
            self._reducer.restore_choice(state.get("choice", {}))
        self._reducer.restore_factors(state.get("factors", {}))

    def own_state(self) -> dict[str, Any]:
        """See Strategy. The state is what a codec has left out."""
        return self._reducer.state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy.

        Raises:
            CheckpointError: a codec has left out values, and virtual ranks would not send them the same on any ranks.
        """
        state = without_rounds(state)
        if self.virtual and any(key in state for key in ("residual", "carried")):
            raise CheckpointError(
                f"{self._world.name()}: the checkpoint holds values that a codec has left out of gradients, and "
                "virtual ranks send all of a gradient; go on without virtual_ranks, or from a checkpoint without a "
                "codec"
            )
        self._reducer.restore(state)

    def changes(self) -> list[tuple[int, str]]:
        """See Strategy."""
        if not isinstance(self._reducer, ChoosingReducer):
            return []
        changes, self._reducer.changes = self._reducer.changes, []
        return changes

    def close(self) -> None:
        """See Strategy."""
        self._reducer.close()
