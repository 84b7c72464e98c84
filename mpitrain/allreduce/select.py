"""auto: the algorithm for a buffer's size, the same on all ranks because it depends on nothing else."""

from __future__ import annotations

import numpy

from mpitrain.allreduce.algorithm import Handle, check_flat
from mpitrain.allreduce.native import native
from mpitrain.allreduce.ring import ring
from mpitrain.arrays import Array
from mpitrain.world import World

RING_FROM_BYTES = 512 * 1024  # measured: see docs/log.md


class _Auto:
    def __init__(self, world: World) -> None:
        self._native, self._ring = native(world), ring(world)

    def start(self, flat: Array) -> Handle:
        """See Algorithm."""
        check_flat(flat)
        return (self._ring if flat.nbytes >= RING_FROM_BYTES else self._native).start(flat)

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm."""
        return self._ring.allocate(count, dtype)


def auto(world: World) -> _Auto:
    """native below RING_FROM_BYTES, ring from there on. See Algorithm for the contract."""
    return _Auto(world)
