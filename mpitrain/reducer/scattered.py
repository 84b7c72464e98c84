"""An Exchange that gives each rank only the mean of its own part, and later gathers the parts that the ranks compute
from it."""

from __future__ import annotations

from weakref import WeakSet

import numpy

from mpitrain.allreduce import make_halves
from mpitrain.allreduce.algorithm import AllreduceHandle, Progress
from mpitrain.arrays import Array
from mpitrain.collectives.shares import scale
from mpitrain.errors import ConfigError, everywhere
from mpitrain.reducer.slot import Slot, Tensors, check_slot
from mpitrain.world.world import World


class ScatteredExchange:
    """See Exchange; only the result of `mean` differs. Both halves together send as much as an allreduce."""

    may_overflow = False
    division = ""

    def __init__(self, world: World, algorithm: str | None = None) -> None:
        """Collective.

        Args:
            world: the World whose ranks take part.
            algorithm: a name in ALGORITHMS, of one that has halves; default: the world's setting.

        Raises:
            ConfigError: the algorithm has no halves, or the world's settings ask for a codec or exact sums. On every
                rank.
            MismatchError: the ranks ask for different algorithms.
        """
        if world.config.compression not in ("none", "auto"):
            raise everywhere(
                ConfigError(
                    f"compression={world.config.compression}: a sharded optimizer sends gradients and parameters as "
                    "they are; leave compression out, or train with mt.Sync, which compresses gradients"
                )
            )
        if world.config.reduction == "exact":
            raise everywhere(
                ConfigError(
                    "reduction=exact: a sharded optimizer adds up gradients in the order of ranks; use "
                    "reduction=plain, or train with mt.Sync, which computes exact sums"
                )
            )
        if world.config.compression == "auto":
            world.print(
                "mpitrain: compression auto: none; a sharded optimizer sends gradients and parameters as they are"
            )
        self.halves = make_halves(world, algorithm)
        self._world = world
        self._slots: WeakSet[Slot] = WeakSet()

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """See Exchange.

        Raises:
            ConfigError: `on_device` is True. Raised on every rank.
        """
        if on_device:
            raise everywhere(
                ConfigError("a sharded optimizer takes parameters on the CPU; for parameters on GPUs, use mt.Sync")
            )
        self._world.queue.finish()
        memory = self.halves.memory
        slot = Slot(numpy.empty(count, dtype) if memory is None else memory.allocate(count, dtype))
        self._slots.add(slot)
        return slot

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange. Afterwards, this rank's share of the part holds the mean; the rest is undefined.

        With `mpitrain verify`, which reads the means, the whole part holds the mean.
        """
        check_slot(self._world, self._slots, slot)
        flat = slot.flat[part]
        scale(flat, share)
        return self._start("reduce-scatter", flat, gathers=self._world.observer is not None)

    def gather(self, flat: Array) -> AllreduceHandle:
        """Begin to gather `flat`, a part of a slot in which each rank has filled its own part.

        Every rank makes the same calls in the same order, as all have agreed on at the end of a step.
        """
        return self._start("allgather", flat, gathers=True)

    def reset(self) -> None:
        """See Exchange. Nothing is kept here."""

    def _start(self, half: str, flat: Array, *, gathers: bool) -> AllreduceHandle:
        def steps() -> Progress:
            if half == "reduce-scatter":
                yield from self.halves.reduce_scatter(flat)
            if gathers:
                yield from self.halves.allgather(flat)

        is_needed = self._world.size > 1 and flat.size > 0
        return AllreduceHandle(self._world, f"{half} {self.halves.name}", flat, steps() if is_needed else iter(()))
