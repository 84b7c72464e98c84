"""aware: a ring by an MPI library that takes addresses of GPU memory, with additions of our own.

The ring of ring.py, over GPU memory: in the first half each rank adds what comes from its left neighbour to a segment
and passes it on; in the second half the finished segments go round.

    0 --> 1 --> 2 --> 3 --> back to 0          4 ranks: 2 x 3 steps, each of a quarter of the buffer

Worked, two ranks with 1 2 and 10 20: rank 0 sends 1 and adds the 20 that comes: 22; rank 1 adds 1 to 10: 11; then each
sends what it has finished.

Only contiguous messages from one rank to another are asked of MPI: that is what libraries do well with GPU memory, by
NVLink, PCIe or straight from the network card (GPUDirect RDMA). Sums in MPI are made by the CPU in most.

MPI knows nothing of streams. So the host looks whether the buffer is filled before the first piece is sent, and whether
a sum has been made before it is sent on; and a message is complete when MPI says so, before an addition is started.

Cost a rank: 2(p-1)/p of the buffer's bytes sent and received, (p-1)/p of its elements added, an event looked at for
each piece. Each sum is made in one place and copied from there: the same bits on every rank.

Source: as ring.py; what MPI promises for GPU memory: each library's documentation, and mpi4py's on GPU-aware MPI.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.device.sequential import DeviceSequential, Place, refuse
from mpitrain.allreduce.group import everyone
from mpitrain.allreduce.ring import plan
from mpitrain.arrays import Array
from mpitrain.control import until
from mpitrain.cuda.aware import why_not_aware
from mpitrain.cuda.device import cupy_module
from mpitrain.cuda.kernels import add
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.streams import happened, mark
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

# Not measured on a GPU yet: large enough for a launch and a look at an event to be small beside it.
PIECE_BYTES = 2**20
AHEAD = 4  # pieces posted for receiving, and at most in sending, at one time
_TAG = 45


def aware(world: World, place: Place | None = None) -> DeviceSequential:
    """Through a CUDA-aware MPI. See Algorithm for the contract; arrays are CuPy's.

    Raises:
        DeviceError: some rank has no GPU, or its MPI library takes no GPU memory. On every rank.
    """
    place = place or Place(world)
    # One rank of a node asks for all: they have one library.
    refuse(world, "aware", why_not_aware(place.gpu.number) if world.local_rank == 0 else "")
    return DeviceSequential(world, place, "aware", aware_steps(world, place))


def aware_steps(world: World, place: Place) -> Any:
    """The ring in the order of the world's nodes. Collective."""
    group, gpu, cupy = everyone(world), place.gpu, cupy_module()
    comm, left, right = group.comm, group.rank(-1), group.rank(1)
    cached_plan = lru_cache(maxsize=256)(plan)
    scratch = _make_scratch(world, place)

    def steps(flat: Array, _residual: Array | None = None) -> Progress:
        pieces = cached_plan(flat.size, flat.itemsize, group.index, group.size, PIECE_BYTES)
        buffer = flat.view(cupy.uint8)
        num_pieces, half = len(pieces), len(pieces) // 2
        # A piece of the first segment waits for nothing to be sent; every other one for the piece one step before.
        free = half // (group.size - 1)
        sends: deque[MPI.Request] = deque()
        receives: deque[MPI.Request] = deque()
        adding: deque[Any] = deque()  # an event for each piece that is being added; None where nothing is
        started = posted = arrived = 0
        sent = ready = 0  # sends that are complete; pieces that have arrived and been added
        filled = mark(gpu, place.stream)
        yield from until(lambda: happened(filled))
        while min(ready, sent) < num_pieces:
            while posted < num_pieces and posted < ready + AHEAD:
                _, receive, its_sum = pieces[posted]
                if its_sum is not None:
                    into = scratch[posted % AHEAD][: receive.stop - receive.start]
                elif posted - half < sent:
                    # Overwrites what was sent half a round before, and has left by now.
                    into = buffer[receive]
                else:
                    break
                receives.append(comm.Irecv(_bytes(into), left, _TAG))
                posted += 1
            while started < num_pieces and started < ready + free and started < sent + AHEAD:
                sends.append(comm.Isend(_bytes(buffer[pieces[started].send]), right, _TAG))
                started += 1
            progress = False
            if receives and receives[0].Test():
                receives.popleft()
                part = pieces[arrived].add
                if part is not None and part.stop > part.start:
                    total = flat[part]
                    add(total, scratch[arrived % AHEAD][: total.nbytes].view(flat.dtype))
                    adding.append(mark(gpu, place.stream))
                else:
                    adding.append(None)
                arrived += 1
                progress = True
            while adding and (adding[0] is None or happened(adding[0])):
                adding.popleft()
                ready += 1
                progress = True
            while sends and sends[0].Test():
                sends.popleft()
                sent += 1
                progress = True
            if not progress:
                yield None

    return steps


def _bytes(array: Array) -> list[Any]:
    """For mpi4py, which takes the address from the CUDA array interface; an empty array has none there."""
    from mpi4py import MPI

    return [array if array.size else numpy.empty(0, numpy.uint8), MPI.BYTE]


def _make_scratch(world: World, place: Place) -> list[Array]:
    """Where pieces arrive."""
    with allocating(world, place.gpu, AHEAD * PIECE_BYTES, "arriving pieces"):
        return [cupy_module().empty(PIECE_BYTES, numpy.uint8) for _ in range(AHEAD)]
