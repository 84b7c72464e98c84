"""aware: a ring through an MPI library that accepts addresses of GPU memory, with mpitrain's own additions.

The ring of ring.py, over GPU memory: in the first half each rank adds what comes from its left neighbour to a segment
and passes it on; in the second half the finished segments go round.

    0 --> 1 --> 2 --> 3 --> back to 0          4 ranks: 2 x 3 steps, each of a quarter of the buffer

Worked, two ranks with 1 2 and 10 20: rank 0 sends 2 and adds the 10 that comes: 11; rank 1 adds 2 to 20: 22; then each
sends what it has finished.

MPI only gets contiguous messages from one rank to another: libraries do these well with GPU memory, by NVLink, PCIe or
directly from the network card (GPUDirect RDMA). In most libraries, the CPU computes MPI's sums.

MPI knows nothing of streams. So the host checks that the buffer is filled before it sends the first piece, and that a
sum is complete before it passes the sum on. It starts an addition after MPI has completed the message.

Cost a rank: 2(p-1)/p of the buffer's bytes sent and received, (p-1)/p of its elements added, an event checked for each
piece. Each sum is made in one place and copied from there: the same bits on every rank.

Source: as ring.py; what MPI promises for GPU memory: each library's documentation, and mpi4py's on GPU-aware MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy

from mpitrain.allreduce.algorithm import Progress, Steps
from mpitrain.allreduce.group import everyone
from mpitrain.allreduce.ring import around
from mpitrain.arrays import Array
from mpitrain.cuda.aware_probe import why_not_aware
from mpitrain.cuda.device import cupy_module
from mpitrain.cuda.kernels import add
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential, refuse
from mpitrain.cuda.streams import happened, mark
from mpitrain.waiting.control import until
from mpitrain.waiting.pieces import Mover
from mpitrain.world.world import World

# Not measured on a GPU yet. The size is chosen so that a launch and a look at an event take little time in comparison.
PIECE_BYTES = 2**20
AHEAD = 4  # pieces posted for receiving, and at most in sending, at one time
_TAG = 45


def aware(world: World, place: DevicePlace | None = None) -> DeviceSequential:
    """Through a CUDA-aware MPI. See Algorithm for the contract; arrays are CuPy's.

    Raises:
        DeviceError: some rank has no GPU, or its MPI library does not accept GPU memory. Raised on every rank.
    """
    place = place or DevicePlace(world)
    # One rank of a node answers for all, because they have one library.
    refuse(world, "aware", why_not_aware(place.gpu.number) if world.local_rank == 0 else "")
    return DeviceSequential(world, place, "aware", aware_steps(world, place))


def aware_steps(world: World, place: DevicePlace) -> Steps:
    """The ring in the order of the world's nodes. Collective."""
    group, gpu = everyone(world), place.gpu

    def add_here(total: Array, arrived: Array) -> Callable[[], bool]:
        add(total, arrived)
        return partial(happened, mark(gpu, place.stream))

    ring = around(
        group,
        Mover(group.comm, _TAG, AHEAD, _make_scratch(world, place)),
        reduces=True,
        gathers=True,
        piece_bytes=PIECE_BYTES,
        add=add_here,
    )

    def steps(flat: Array, _residual: Array | None = None) -> Progress:
        filled = mark(gpu, place.stream)
        yield from until(lambda: happened(filled))
        yield from ring(flat)

    return steps


def _make_scratch(world: World, place: DevicePlace) -> list[Array]:
    """Make the memory in which pieces arrive."""
    with allocating(world, place.gpu, AHEAD * PIECE_BYTES, "arriving pieces"):
        return [cupy_module().empty(PIECE_BYTES, numpy.uint8) for _ in range(AHEAD)]
