"""native: MPI's own allreduce, with the algorithm that the library chooses.

Cost: depends on the library; for short arrays few latencies, log2(p) at best. Best for small buffers, where the ring's
2(p - 1) steps cost more than the bytes.

float16 and bfloat16 have no MPI datatype that every library can add. So they travel as 16-bit words with an operation
of mpitrain (MPI-4.1, section 6.9.5), which rounds to the dtype after every addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16, Progress, Sequential, Steps
from mpitrain.allreduce.costs import Topology, native_below_bytes
from mpitrain.allreduce.group import Group, everyone
from mpitrain.allreduce.hierarchical import hierarchical_seconds
from mpitrain.allreduce.recursive_doubling import recursive_doubling_steps
from mpitrain.allreduce.shared_memory import shared_memory_seconds
from mpitrain.waiting import transfer
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_SPINS = 30
_HALVES = (numpy.dtype(numpy.float16), BFLOAT16)


def native(world: World) -> Sequential:
    """MPI_Iallreduce in place. See Algorithm for the contract."""
    return Sequential(world, "native", native_steps(everyone(world)))


def native_seconds(num_bytes: int, topology: Topology) -> float:
    """The time of the algorithm for large buffers, scaled down, up to the size at which MPI's own call becomes slower.

    The library's algorithm is unknown, so its time is not modelled. Only the size at which the two are equally fast is
    known, from a measurement or a rule of thumb (costs.native_below_bytes).
    """
    limit = native_below_bytes(topology.profile, topology.num_nodes)
    if topology.lanes or num_bytes >= limit:
        return math.inf
    large = shared_memory_seconds if topology.num_nodes == 1 else hierarchical_seconds
    return large(num_bytes, topology) * (num_bytes / limit)


def native_steps(group: Group) -> Steps:
    """MPI's own call if the group has all ranks of its communicator, otherwise recursive doubling.

    MPI's call is for whole communicators. A group makes no communicator, because libraries have few.
    """
    comm = group.comm
    if group.size < comm.size:
        return recursive_doubling_steps(group)
    from mpi4py import MPI

    def steps(flat: numpy.ndarray, _residual: numpy.ndarray | None = None) -> Progress:
        for begin in range(0, flat.size, transfer.AT_ONCE):
            part = flat[begin : begin + transfer.AT_ONCE]
            if flat.dtype in _HALVES:
                words = part.view(numpy.uint16)
                request = comm.Iallreduce(MPI.IN_PLACE, [words, MPI.UINT16_T], _addition(flat.dtype))
            else:
                request = comm.Iallreduce(MPI.IN_PLACE, part, MPI.SUM)
            # A short call ends sooner than a full wait would begin.
            for _ in range(_SPINS):
                if request.Test():
                    break
            else:
                while not request.Test():
                    yield None

    return steps


@cache
def _addition(dtype: numpy.dtype) -> MPI.Op:
    """Make one operation per process. It belongs to no communicator, and mpi4py allows only 16 operations."""
    from mpi4py import MPI

    return MPI.Op.Create(_adder(dtype), commute=True)


def _adder(dtype: numpy.dtype) -> Callable[[Any, Any, MPI.Datatype], None]:
    def add(source: Any, target: Any, _: MPI.Datatype) -> None:
        total = numpy.frombuffer(target, dtype)
        with numpy.errstate(all="ignore"):
            numpy.add(numpy.frombuffer(source, dtype), total, out=total)

    return add
