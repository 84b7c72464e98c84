"""sync: every step uses the mean gradient of all ranks, so n ranks compute what one rank would.

auto: the same, but the exchange is chosen during training: the algorithm of the sums, the size of buckets, and a codec
if codecs are allowed. Local updates and a sharded optimizer change the training or its memory, so only the user can
choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.allreduce.costs import codecs_of_auto
from mpitrain.arrays import is_device_array
from mpitrain.compression import factory_of
from mpitrain.errors import CheckpointError, ConfigError, everywhere
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.by_network import codecs_by_network, compression_by_network
from mpitrain.reducer.exchange import Exchange, make_exchange
from mpitrain.reducer.means import Means
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.strategies.choosing_reducer import ChoosingReducer, no_choice
from mpitrain.strategies.strategy import MeanStrategy, applied, refuse_round, share_parameters
from mpitrain.strategies.virtual_ranks import ComputedPlaces, VirtualPasses, VirtualRanks, check_virtual_ranks
from mpitrain.world.world import World


class Sync(MeanStrategy):
    """Synchronous data parallelism; see Strategy for the calls.

    Attributes:
        exchange: makes the object that computes the means, for a World.
        warm_up: the number of first steps of the training that are exchanged without compression.
        virtual: the virtual ranks; None: there are none, and each rank computes its part of a batch at once.
        places: where the virtual ranks were computed.
        varies: algorithm and buckets are chosen during training; see AutoSync.
    """

    varies = False

    def __init__(
        self,
        exchange: Callable[[World], Exchange] = make_exchange,
        *,
        warm_up: int = 0,
        virtual_ranks: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            exchange: makes the object that computes the means, for a World.
            warm_up: the number of first steps of the training whose gradients are exchanged without compression,
                because training is then sensitive to inexact gradients. With `power_sgd`, PyTorch's documentation
                advises 10 % of all steps, and no fewer than the warm-up of the learning rate.
            virtual_ranks: cut every global batch into this many equal parts, and compute the gradients of each part
                separately. Their exact sum has the same bits on 1 to `virtual_ranks` ranks, if each rank has the same
                number of threads. See docs/explanation/numerics.md#bitwise-identical-results-on-any-number-of-ranks.
            seed: of the random numbers of virtual ranks, at least 0.

        Raises:
            ConfigError: `warm_up` is not allowed.
        """
        if not isinstance(warm_up, int) or isinstance(warm_up, bool) or warm_up < 0:
            raise ConfigError(f"Sync: warm_up={warm_up!r}; it must be an int of at least 0")
        if warm_up and virtual_ranks is not None:
            raise ConfigError(
                f"Sync: warm_up={warm_up} together with virtual_ranks={virtual_ranks}, with which nothing is "
                "compressed. Leave out one of the two"
            )
        self.exchange, self.warm_up, self._left_to_warm_up = exchange, warm_up, 0
        self.virtual = None if virtual_ranks is None else VirtualRanks(virtual_ranks, seed)
        self.places = ComputedPlaces()

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters.

        With compression=auto, the use of bf16 is decided during training; see choosing_reducer.py.

        Raises:
            ConfigError: the virtual ranks cannot be divided between the ranks, or gradients cannot be added up exactly;
                or there is a warm-up, and the exchange is chosen during training. Raised on every rank.
        """
        self._world = world
        if self.warm_up:
            world.agree("begin", [f"Sync(warm_up={self.warm_up})"])
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        exchange, number = self.exchange, None
        if self.virtual:
            check_virtual_ranks(world, self.virtual, has_own_exchange=exchange is not make_exchange)
            exchange, number = partial(make_exchange, reduction="exact"), self.virtual.number
        codecs = self.codecs_for(world, adapter.layout)
        if codecs and self.warm_up:
            raise everywhere(
                ConfigError(
                    f"Sync: warm_up={self.warm_up} together with compression=auto, which chooses while it trains. Name "
                    "the compression, or leave warm_up out"
                )
            )
        reason = no_choice(world, adapter.layout, codecs, varies=self.varies) if codecs else "no choice"
        if not reason:
            self._reducer = ChoosingReducer(
                world, adapter.layout, on_device=on_device, codecs=codecs, varies=self.varies
            )
        else:
            if self.varies:
                world.print(f"mpitrain: strategy auto trains as sync: {reason}")
                if world.config.compression != "auto":
                    exchange = partial(make_exchange, compression=codecs[0])
            self._make_reducer = partial(
                GradientReducer, world, adapter.layout, on_device=on_device, virtual_ranks=number
            )
            self._coded, self._left_to_warm_up, self._is_warm_up = exchange, self.warm_up, self.warm_up > 0
            self._reducer = self._make_reducer(exchange=self._exchange_now())
        self._scale = adapter.loss_scale
        count_steps = getattr(adapter, "count_steps", None)
        self._steps = count_steps(world) if count_steps and world.size > 1 else None
        share_parameters(world, adapter)

    @property
    def unplanned(self) -> str:
        """See Strategy."""
        return f"mt.Sync(virtual_ranks={self.virtual.number})" if self.virtual else ""

    def passes(self, adapter: Adapter, data: Any) -> VirtualPasses | None:
        """See Strategy: a pass for each virtual rank.

        Raises:
            ConfigError: the data, or the adapter, cannot be used with the virtual ranks. Raised on every rank.
        """
        return VirtualPasses(self._world, adapter, data, self, self.virtual) if self.virtual else None

    def codecs_for(self, world: World, parameters: Sequence[Parameter]) -> Sequence[str]:
        """The codecs from which one is chosen during training, beginning with the first. Empty: nothing is chosen.

        Collective. `parameters`: those of the model.
        """
        chooses = world.config.compression == "auto" and self.exchange is make_exchange and self.virtual is None
        return ["none", *codecs_of_auto()] if chooses else []

    def begin_step(self, weight: float | Sequence[float]) -> None:
        """See Strategy. With virtual ranks, `weight` has the samples of each of this rank's."""
        self._follow_warm_up()
        steps = self._steps.code if self._steps else 0
        self._reducer.begin(weight, self._scale.value if self._scale else 1.0, steps=steps)

    def next_pass(self, adapter: Adapter, loss: float) -> None:
        """End the pass of a virtual rank with its mean loss. The pass of this rank's next one follows."""
        assert isinstance(self._reducer, GradientReducer)  # with virtual ranks there is no choice
        self._reducer.next_pass(loss, adapter.note())

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy.

        Raises:
            MismatchError: the previous step used different gradients or rates on a rank. Raised on every rank.
        """
        means = self._reducer.finish(loss, may_skip=self._may_skip, note=adapter.note())
        if self._steps:
            self._steps.exchanged(means.steps, ())
        self._world.commit()
        rate = applied(adapter, self._reducer.flats, means, self._scale)
        self._left_to_warm_up = max(0, self._left_to_warm_up - 1)
        return means, rate

    def _exchange_now(self) -> Callable[[World], Exchange]:
        return partial(make_exchange, compression="none") if self._left_to_warm_up else self._coded

    def _follow_warm_up(self) -> None:
        """Begin or end the warm-up if the next step crosses its boundary. Collective in that case."""
        if self.warm_up and self._is_warm_up != bool(self._left_to_warm_up):
            self._reducer.close()
            self._reducer = self._make_reducer(exchange=self._exchange_now())
            self._is_warm_up = bool(self._left_to_warm_up)

    def end_run(self) -> None:
        """See Strategy. The replicas are equal.

        Raises:
            MismatchError: the last steps of the ranks' optimizers differ. Raised on every rank.
        """
        if self._steps:
            codes = self._world.agree("end the run", detail=self._steps.code)["detail"].tolist()
            self._steps.exchanged(codes, ())

    def state(self) -> dict[str, Any]:
        """See Strategy: `factors`, if compression continues from them; `warm_up`, `virtual`, `places` or `choice`."""
        if isinstance(self._reducer, ChoosingReducer):
            return {"choice": self._reducer.choice()}
        state = super().state()
        if self._left_to_warm_up:
            state["warm_up"] = self._left_to_warm_up
        if self.virtual:
            state |= {"virtual": self.virtual.state(), "places": self.places.state()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. What an outer optimizer has kept is left out. Collective.

        Raises:
            CheckpointError: the state is from the middle of a round of LocalSGD or DiLoCo, or of other virtual
                ranks.
        """
        refuse_round(state)
        self._left_to_warm_up = state.get("warm_up", 0) if self.warm_up else 0
        self._follow_warm_up()
        if self.virtual and "virtual" in state:
            self.virtual.check(state["virtual"])
            self.places.restore(state.get("places", []))
        if isinstance(self._reducer, ChoosingReducer):
            self._reducer.restore_choice(state.get("choice", {}))
        super().restore(state)

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy.

        Raises:
            CheckpointError: there is an error-feedback residual, which depends on the ranks; virtual ranks must not.
        """
        if self.virtual and any(key in state for key in ("residual", "carried")):
            raise CheckpointError(
                f"{self._world.name()}: the checkpoint holds values that a codec has not sent of gradients, and "
                "virtual ranks send all of a gradient; continue without virtual_ranks, or from a checkpoint without a "
                "codec"
            )
        super().restore_own(state)

    def changes(self) -> list[tuple[int, str]]:
        """See Strategy."""
        if not isinstance(self._reducer, ChoosingReducer):
            return []
        changes, self._reducer.changes = self._reducer.changes, []
        return changes


class AutoSync(Sync):
    """Synchronous data parallelism that searches for the fastest exchange; see Sync, and low-communication.md."""

    varies = True

    def __init__(self, codecs: Sequence[str] = (), *, network: str | None = None) -> None:
        """
        Args:
            codecs: names in mpitrain.compression.CODECS that may be chosen besides no codec. Default: as in the setting
                `compression`: "none": no codec; "auto": bf16; the name of a codec: always that codec.
            network: in place of `codecs`, the rate of each node's link, such as "1Gbit/s": the first steps take what
                suits it, by the model and the number of nodes, and later ones what is faster. A codec that costs loss
                is never taken; see mpitrain/reducer/by_network.py.

        Raises:
            ConfigError: a name is not that of a codec, or both arguments are given.
        """
        super().__init__()
        for name in codecs:
            factory_of(name)  # raises
        if codecs and network is not None:
            raise ConfigError(
                f"AutoSync: network={network} together with codecs={', '.join(codecs)}: both say what may be chosen. "
                "Leave out one of the two"
            )
        self._given, self._network = tuple(codecs), network

    def codecs_for(self, world: World, parameters: Sequence[Parameter]) -> Sequence[str]:
        """See Sync.

        Raises:
            ConfigError: codecs or a network were given, and the setting names a codec; or the network is not a rate.
                Raised on every rank.
        """
        if self._network is not None:
            first = compression_by_network(world, self._network, parameters)
            return list(dict.fromkeys([first, "none", *codecs_by_network()]))
        if not self._given:
            setting = world.config.compression
            return super().codecs_for(world, parameters) or [setting]
        if world.config.compression not in ("none", "auto"):
            raise everywhere(
                ConfigError(
                    f"the setting compression={world.config.compression} together with AutoSync(codecs="
                    f"{', '.join(self._given)}): allowed is one of the two. Leave out the setting, or codecs="
                )
            )
        return ["none", *dict.fromkeys(self._given)]
