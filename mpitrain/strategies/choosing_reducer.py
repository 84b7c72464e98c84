"""ChoosingReducer: a GradientReducer that measures step times and changes how gradients are exchanged.

After the same steps, all ranks report, rank 0 decides (chooser.py), and all change between the same two steps. The
error-feedback residual goes into the means of the next step, so a change loses nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.arrays import Array
from mpitrain.compression import power_sgd
from mpitrain.forecast.ways import ExchangeWay, way_of_settings
from mpitrain.job.worlds import own_cores
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.means import Means
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.state.resume import add_up
from mpitrain.strategies.chooser import Chooser, Decision, StepMedians, StepParts, StepSeconds
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.strategies.live_forecast import LiveForecast


def no_choice(world: World, parameters: Sequence[Parameter], codecs: Collection[str], *, varies: bool) -> str:
    """Return why there is no choice; "": there is one. The same on every rank. Arguments: see ChoosingReducer."""
    config = world.config
    if world.num_nodes == 1:
        return "all ranks are on one node"
    if config.reduction == "exact":
        return "exact sums cannot be forecast"
    if config.algorithm == "native":
        return "MPI's own sums (MPITRAIN_ALGORITHM=native) cannot be forecast"
    if len(set(Counter(world.node_ranks).values())) > 1:
        return "the nodes have different numbers of ranks, which cannot be forecast"
    if any(codec.partition(":")[0] == power_sgd.NAME for codec in codecs):
        return "power_sgd cannot be forecast"
    if not varies and any(one.dtype != numpy.float32 for one in parameters):
        return "codecs take float32, and the gradients are not all float32"
    return ""


class ChoosingReducer:
    """Has the calls of GradientReducer that mt.Sync makes.

    Attributes:
        changes: the changes since the caller last read them, each as a step number and a text; the same on every rank.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[Parameter],
        *,
        on_device: bool,
        codecs: Sequence[str],
        varies: bool,
    ) -> None:
        """Collective: all ranks compare `codecs` and `varies`. `no_choice` of the same arguments must be "".

        Args:
            codecs: the codecs that may be chosen, beginning with the initial one; "none" for no codec.
            varies: other algorithms and other bucket sizes may be chosen too, unless a setting names one.

        Raises:
            MismatchError: the arguments of the ranks differ. Raised on every rank.
            GradientError, DataError, ConfigError: as for GradientReducer, also for a codec that is set but cannot be
                used.
        """
        world.agree("choose how gradients travel", [f"codecs {', '.join(codecs)}", f"varies {varies}"])
        self._world, self._parameters, self._on_device = world, parameters, on_device
        if codecs[0] == "none" != codecs[-1] and any(one.dtype != numpy.float32 for one in parameters):
            world.print("mpitrain: no codec is chosen: codecs take float32, and the gradients are not all float32")
            codecs = ["none"]
        self._codecs, self._varies = codecs, varies
        self._plain = self._set_way(codecs[0])
        self.changes: list[tuple[int, str]] = []
        self._steps = 0
        self._pending: ExchangeWay | None = None  # the configuration to continue with, after a restore
        self._restored: Mapping[str, Any] | None = None
        self._moving: dict[str, Any] | None = None  # the state, between two configurations
        self._parts = StepParts(len(parameters))
        self._cores = own_cores(world)
        self._forecast: LiveForecast | None = None
        self._present = self._kept = self._plain
        self._inner = self._made(self._plain)
        self._begin()

    def begin(self, weight: float | Sequence[float], loss_scale: float = 1.0, *, steps: int = 0) -> None:
        """See GradientReducer. If a decision is due, it comes first. Collective."""
        self._catch_up()
        if self._left == 0:
            self._look()
        self._parts.begin()
        self._inner.begin(weight, loss_scale, steps=steps)

    def ready(self, index: int, gradient: Array | None) -> None:
        """See GradientReducer."""
        self._inner.ready(index, gradient)
        self._parts.ready(index)

    def finish(self, loss: float, *, may_skip: bool = False, note: Any = None) -> Means:
        """See GradientReducer."""
        means = self._inner.finish(loss, may_skip=may_skip, note=note)
        self._parts.end(means.overlap)
        self._steps += 1
        self._left -= 1
        return means

    @property
    def flats(self) -> dict[numpy.dtype, Array]:
        """See GradientReducer."""
        return self._inner.flats

    def choice(self) -> dict[str, Any]:
        """Return, for a checkpoint, the kept configuration, the nodes, and the number of steps. Equal on all ranks."""
        return {
            "algorithm": self._kept.algorithm,
            "codec": self._kept.codec,
            "bucket_mib": self._kept.bucket_mib or 0.0,
            "nodes": list(self._world.node_ranks),
            "steps": self._steps,
        }

    def restore_choice(self, choice: Mapping[str, Any]) -> None:
        """Continue from a `choice`. Not collective, equal on all ranks.

        On other nodes, or if the configuration is no longer allowed, the choice starts again.
        """
        self._steps = int(choice.get("steps", 0))
        self._pending = self._plain
        if list(choice.get("nodes", ())) == list(self._world.node_ranks):
            way = ExchangeWay(choice["algorithm"], choice["codec"], choice["bucket_mib"] or None)
            self._pending = way if self._is_allowed(way) else self._plain

    def _set_way(self, codec: str) -> ExchangeWay:
        config = self._world.config
        return way_of_settings(config.algorithm, config.bucket_mib, codec)

    def _is_allowed(self, way: ExchangeWay) -> bool:
        """Whether this run could choose the configuration. The previous run may have had other settings."""
        plain = self._set_way(way.codec)
        if way.codec not in self._codecs or not self._varies:
            return way.codec in self._codecs and way == plain
        return plain.algorithm in ("auto", way.algorithm) and plain.bucket_mib in (None, way.bucket_mib)

    def state(self) -> dict[str, Any]:
        """See GradientReducer. Collective, except in a broken World."""
        if self._moving is not None:  # a rank was lost in between
            return {"place": "", **self._moving} if self._moving else {}
        if not self._world.control.is_broken:
            self._catch_up()
        return self._inner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See GradientReducer."""
        self._inner.restore(state)
        self._restored = state

    def factors(self) -> dict[str, numpy.ndarray]:
        """See GradientReducer. No configuration that can be chosen has factors."""
        return {}

    def restore_factors(self, factors: Mapping[str, numpy.ndarray]) -> None:
        """See GradientReducer."""

    def close(self) -> None:
        """See GradientReducer."""
        self._inner.close()

    def _made(self, way: ExchangeWay) -> GradientReducer:
        algorithm = way.algorithm if way.codec == "none" else None
        return GradientReducer(
            self._world,
            self._parameters,
            exchange=partial(make_exchange, algorithm=algorithm, compression=way.codec),
            bucket_bytes=None if way.bucket_mib is None else round(way.bucket_mib * 2**20),
            on_device=self._on_device,
        )

    def _begin(self) -> None:
        """Begin to choose, from the current configuration."""
        self._chooser = Chooser(self._plain, self._present, self._steps)
        self._follow(self._chooser.begin())

    def _catch_up(self) -> None:
        """Change to the configuration of a restored checkpoint. Collective."""
        way, state = self._pending, self._restored
        self._pending = self._restored = None
        if way is None:
            return
        self._kept = way
        if way != self._present:
            self._change(way)
            if state is not None:
                self._inner.restore(state)
        self._begin()

    def _change(self, way: ExchangeWay) -> None:
        """Change the exchange. The error-feedback residual goes into the next means. Collective."""
        step, state = self._inner.leave()
        self._moving = {}
        if state:
            add_up(self._moving, state)
        self._inner = self._made(way)
        self._inner.follow(step, self._moving)
        self._present, self._moving = way, None

    def _look(self) -> None:
        """Decide together how to continue."""
        world = self._world
        medians = self._parts.medians(with_ready=world.is_root)
        of_ranks: list[StepMedians] = world.allgather(medians)
        decision: Decision | None = None
        with world.together("choose how gradients travel"):
            if world.is_root:
                decision = self._decide(of_ranks)
        self._follow(world.broadcast_object(decision))

    def _decide(self, of_ranks: Sequence[StepMedians]) -> Decision:
        from mpitrain.strategies.live_forecast import LiveForecast  # loads the simulator, which only one rank needs

        if self._forecast is None:
            self._forecast = LiveForecast(
                self._world, self._inner.layout, self._codecs, cores=self._cores, varies=self._varies
            )
        slowest = max(of_ranks, key=lambda one: one.seconds)
        all_ranks = StepSeconds(slowest.seconds, slowest.error, max(one.own_seconds for one in of_ranks))
        began = time.perf_counter()
        decision = self._chooser.look(self._steps, all_ranks, partial(self._forecast, of_ranks))
        self._chooser.look_took(time.perf_counter() - began)
        return decision

    def _follow(self, decision: Decision) -> None:
        """Carry out a decision."""
        if decision.way != self._present:
            self._change(decision.way)
        self._kept, self._left = decision.kept, decision.num_steps
        if decision.skipped is not None:
            self._parts.clear(decision.skipped)
        if decision.line:
            self._world.print(f"mpitrain: step {self._steps}: {decision.line}")
            self.changes.append((self._steps, decision.line))
