"""A rank with several virtual ranks adds several summands to each mean: the weighted gradients of each virtual rank.

    rank 0     virtual rank 0     virtual rank 1        each computes gradients of its own samples
                   x share            x share           each product is rounded by itself
                      \\                 /
    all ranks          one exact sum of all products    (mpitrain/allreduce/exact.py)

A share is the virtual rank's samples, divided by those of the whole batch. So no product, and no sum of all of them,
depends on which rank computed it: the means are bitwise identical on any number of ranks.

Source: EasyScale, Li et al., EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs,
SC 2023. There the order of a sum is that of the virtual ranks; here the sum has no order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy

from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.collectives.shares import exact_total, scale
from mpitrain.reducer.bucket import Bucket, Layout
from mpitrain.reducer.checks import all_finite
from mpitrain.reducer.exchange import PlainExchange
from mpitrain.reducer.slot import Slot
from mpitrain.world.shard import part_of
from mpitrain.world.world import World


class Summands:
    """The gradients of this rank's virtual ranks in one step. Those of the last one are in the slots of the reducer.

    Attributes:
        own: the numbers of this rank's virtual ranks.
        unused: indices of the parameters on which the loss of none of them depends.
        note: that of the first one with samples.
        missing: indices of the parameters whose gradients one of them has not passed.
        non_finite: index of a parameter with NaN or infinity in the gradients of one of them, except the last; -1:
            there is none.
    """

    def __init__(self, world: World, layout: Layout, exchange: PlainExchange, virtual_ranks: int) -> None:
        """Host memory for the gradients of all virtual ranks of this rank but the last. `exchange` adds up exactly."""
        self._world = world
        self._layout = layout
        self._exchange = exchange
        own = part_of(virtual_ranks, world.rank, world.size)
        self.own = range(own.start, own.stop)
        self._are_several = virtual_ranks > world.size  # on some rank, and so all ranks give a list
        self._flats = [
            {dtype: numpy.empty(count, dtype) for dtype, count in layout.counts.items()} for _ in self.own[1:]
        ]
        self._views = [layout.views(flats) for flats in self._flats]

    def begin(self, weights: Sequence[float]) -> float:
        """Begin a step with the weight of each virtual rank of this rank, in samples. Return their sum."""
        assert len(weights) == len(self.own)
        self._weights = weights
        self._losses: list[float] = []  # each times its weight
        self.unused: list[int] | None = None
        self.note: Any = None
        self.missing: set[int] = set()
        self.non_finite = -1
        return sum(weights)

    @property
    def is_last(self) -> bool:
        """True while the gradients of the last virtual rank arrive."""
        return len(self._losses) == len(self._flats)

    def take_in(self, index: int, gradient: Any) -> None:
        """Copy a gradient of a virtual rank that is not the last, of its parameter's shape and dtype."""
        self._views[len(self._losses)][index][...] = gradient

    def end(self, loss: float, note: Any, unused: Collection[int], missing: Collection[int]) -> None:
        """End the gradients of a virtual rank. Those of a virtual rank without samples do not count."""
        number = len(self._losses)
        weight = self._weights[number]
        self._losses.append(weight * loss if weight else 0.0)
        self.missing.update(missing)
        if not weight:
            return
        if self.unused is None:
            self.unused, self.note = sorted(unused), note
        else:
            self.unused = [index for index in self.unused if index in unused]
        if number < len(self._flats) and self.non_finite < 0 and not missing:
            self.non_finite = self._look(number)

    @property
    def mean_loss(self) -> float:
        """This rank's mean loss over its samples, for the vote."""
        weight = sum(self._weights)
        return sum(self._losses) / weight if weight else 0.0

    def settle(self, total: float, loss_scale: float) -> float:
        """Compute the shares from the weight of all ranks. Return the share of the last virtual rank."""
        self._total = total
        self._shares = [weight / total / loss_scale for weight in self._weights]
        return self._shares[-1]

    def loss(self) -> float:
        """Return the mean loss over the samples of all ranks. It does not depend on the number of ranks. Collective."""
        return exact_total(self._world, self._losses) / self._total

    def mean(self, slot: Slot, bucket: Bucket, share: float) -> AllreduceHandle:
        """See Exchange.mean; the part is a bucket."""
        part = slice(bucket.begin, bucket.end)
        others = [flats[bucket.dtype][part] for flats in self._flats]
        for other, factor in zip(others, self._shares, strict=False):
            scale(other, factor)
        return self._exchange.mean(slot, part, share, others if self._are_several else None)

    def _look(self, number: int) -> int:
        if all(all_finite(flat) for flat in self._flats[number].values()):
            return -1
        return next((index for index, view in enumerate(self._views[number]) if not numpy.isfinite(view).all()), -1)
