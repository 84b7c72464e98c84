"""sharded_sync: as sync, but each rank has a part of the optimizer's state, and updates that part of the parameters.

    gradients of every rank ─reduce-scatter─> means of the own part ─optimizer─> own parameters ─allgather─> parameters

So each of p ranks needs 1/p of the optimizer's memory. Both halves together send as much as the allreduce of `sync`.
Means and updates are bitwise identical to those of `sync` if that uses the same algorithm and the optimizer does not
clip.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054, section 5.1 (P_os), with the communication of section 7.2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpitrain import collectives
from mpitrain.adapters.adapter import Adapter, OptimizerShard, sharded_of
from mpitrain.arrays import Array, is_device_array
from mpitrain.errors import LostRankError, MismatchError, everywhere
from mpitrain.optim.owned import owned_by, put, size_of
from mpitrain.reducer.means import Means
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.reducer.scattered import ScatteredExchange
from mpitrain.strategies.strategy import MeanStrategy, share_parameters
from mpitrain.waiting.agreement import signature
from mpitrain.world.world import World


class ShardedSync(MeanStrategy):
    """Synchronous data parallelism with a sharded optimizer; see Strategy for the calls.

    Checkpoints are those of Sync: they load on any number of ranks, with either strategy. While one is taken, the ranks
    that write it need the memory of the whole optimizer's state, and all others that of its largest array.

    The part of a lost rank is lost. So the loss of a rank ends the job even with `mpitrain run --recover`.
    """

    keeps_own_state = True

    def __init__(self, exchange: Callable[[World], ScatteredExchange] = ScatteredExchange) -> None:
        """`exchange` is a function of a World that returns the object which computes the means and gathers the
        parameters."""
        self._make_exchange = exchange

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters.

        Raises:
            ConfigError: the adapter or its optimizer cannot be divided, the parameters are on a GPU, or the exchange
                is not possible. Raised on every rank.
            MismatchError: the ranks differ in the optimizer or in the model. Raised on every rank.

        After an error, a PyTorch optimizer has the whole parameters again, and its earlier state.
        """
        self._world, self._scale = world, adapter.loss_scale
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        reducer = GradientReducer(world, adapter.layout, exchange=self._made_exchange, on_device=on_device)
        self._reducer, self._layout, self._buckets = reducer, reducer.layout, reducer.buckets
        own = self._exchange.halves.own
        self._owned = [owned_by(self._layout, self._buckets, own, rank) for rank in range(world.size)]
        shard: OptimizerShard | None = None
        try:
            with world.together("divide the optimizer"):
                self._shard = shard = sharded_of(adapter).shard(self._owned[world.rank], self._norm_of_all)
            world.agree("divide the optimizer", [shard.settings])
            share_parameters(world, adapter)
        except BaseException:
            if shard is not None:
                shard.close()
            raise

    def begin_step(self, weight: float | Sequence[float]) -> None:
        """See Strategy."""
        self._shard.begin_step()
        super().begin_step(weight)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy.

        Raises:
            MismatchError: the ranks have used different learning rates or settings, or the optimizer of some has made
                no step. Raised on every rank.
        """
        means = self._reducer.finish(loss, may_skip=self._may_skip, note=adapter.note())
        self._world.commit()
        rate = 0.0
        if means.is_finite:
            settings = self._shard.settings  # before the update: a PyTorch scheduler then sets the next rates
            rate = adapter.apply_gradients(self._reducer.flats, means.remarks)
            made = "no step, because a hook has removed all gradients, at " if self._shard.was_skipped else ""
            self._gather_parameters(f"{made}the learning rate {rate} and {settings}")
        if self._scale:
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def own_state(self) -> dict[str, Any]:
        """See Strategy. The state holds restored values that have not been sent yet.

        From now until the next step, `state` of the adapter has all parts.

        Raises:
            LostRankError: a rank has been lost, and its part with it.
            MpitrainError: a rank has no room for all parts. Raised on every rank.
        """
        return self.own_state_for(reads=True)

    def own_state_for(self, reads: bool) -> dict[str, Any]:
        """See the function of that name. Only ranks with `reads` keep all parts. Raises as `own_state` does."""
        if self._world.control.is_broken and self._world.committer is not None:
            raise LostRankError(
                f"{self._world.name()}: a rank has been lost, and with it its part of the optimizer's state, which "
                "ShardedSync keeps on one rank only. It cannot continue in place; if it may restart, it starts again "
                "from the in-memory checkpoint; with mt.Sync the others continue without the lost rank"
            )
        self._lend_optimizer(reads)
        return self._reducer.state()

    def close(self) -> None:
        """See Strategy. The optimizer has the whole parameters again. Read its state first: see
        OptimizerShard.close."""
        super().close()
        self._shard.close()

    def _made_exchange(self, world: World) -> ScatteredExchange:
        self._exchange = self._make_exchange(world)
        return self._exchange

    def _norm_of_all(self, norm: float) -> float:
        """The norm of the gradients of all parts, bitwise identical on every rank."""
        norms = self._world.agree("norm of the mean gradient", value=norm)["value"].tolist()
        return math.hypot(*norms)

    def _gather_parameters(self, used: str) -> None:
        """Gather the new parameters of all owners, and compare the settings (`used`) with which they were updated."""
        # As a detail, because a difference in the lines would end the gathering halfway.
        comparison = self._world.begin_agreement("update of the own part", detail=signature(used, ()) >> 1)
        flats = self._reducer.flats
        handles = [self._exchange.gather(flats[bucket.dtype][bucket.begin : bucket.end]) for bucket in self._buckets]
        for handle in handles:
            handle.wait()
        self._shard.take_updated(flats)
        if len(set(comparison.wait()["detail"].tolist())) > 1:
            of_ranks = self._world.allgather(used)
            rank = next(rank for rank, text in enumerate(of_ranks) if text != of_ranks[0])
            raise everywhere(
                MismatchError(
                    f"{self._world.name(rank)} has updated its part of the parameters with "
                    f"{of_ranks[rank]}; {self._world.name(0)}: {of_ranks[0]}. Give the optimizer the same "
                    "settings, schedule and hooks on every rank"
                )
            )

    def _lend_optimizer(self, reads: bool) -> None:
        """Gather the optimizer's state, and keep it on a rank that `reads` it. Collective."""
        values = self._world.allgather((self._shard.values(), self._shard.array_names()))
        names = sorted({name for _, of_rank in values for name in of_rank})
        arrays: dict[str, Mapping[numpy.dtype, Array]] = {}
        counts = self._layout.counts
        for name in names:
            # The memory for the gathering is allocated first, so that a rank without memory raises before the others
            # wait for it.
            with self._world.together("bring the optimizer's state together"):
                own = self._shard.array(name)
                arrays[name] = {dtype: numpy.empty(counts[dtype], dtype) for dtype in own if reads}
                room = [numpy.empty(counts[dtype], dtype) for dtype in own]
                del room
            for dtype, part in own.items():
                self._gather_in_order(dtype, part, arrays[name].get(dtype))
        if reads:
            self._shard.lend([of_rank for of_rank, _ in values], arrays)

    def _gather_in_order(self, dtype: numpy.dtype, part: Array, whole: Array | None) -> None:
        """Gather the parts of all ranks, and copy them into `whole`, if given, at their owners' places."""
        joined, begin = collectives.allgather(self._world, part).wait(), 0
        if whole is None:
            return
        for owned in self._owned:
            ranges: Sequence[slice] = owned[dtype]
            put(ranges, joined[begin : begin + size_of(ranges)], whole)
            begin += size_of(ranges)
