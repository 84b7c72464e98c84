"""staged: through page-locked host memory, piece by piece, so that copies both ways and the network work at once.

A buffer is cut into pieces. Each goes down to the host, is summed there by the host arrays' algorithm (the setting
`algorithm`), and goes up again. A few slots of host memory are used in turn:

    GPU to host     | 0 | 1 | 2 | 3 | 4 | 5 |
    sum over ranks      |  0  |  1  |  2  |  3  |  4  |  5  |
    host to GPU               | 0 |   | 1 |   | 2 |   | 3 | ...

Worked, two ranks with 1 2 3 4 and 10 20 30 40 in two pieces: 1 2 and 10 20 come down and are being summed while 3 4 and
30 40 come down; 11 22 goes up while 33 44 is summed.

The copies down and up have a stream each, because a GPU has an engine for each. The host looks at one event per piece,
the end of its copy down. The two streams settle between them when a slot is free again. If the copies are faster than
the sum, only the first piece's copy down and the last one's copy up are not hidden.

Cost a rank: N bytes down, N bytes up, and what the host's algorithm costs. All ranks have the same bits, because the
host's sums have. It needs nothing but CUDA and MPI, and works for any placement of ranks.

Source: the pipelined copies of NVIDIA, How to overlap data transfers in CUDA C/C++ (2012), around any allreduce.
"""

from __future__ import annotations

import sys

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Algorithm, Progress, Steps
from mpitrain.allreduce.device.sequential import DevicePlace, DeviceSequential
from mpitrain.arrays import Array
from mpitrain.cuda.device import cupy_module, raise_first
from mpitrain.cuda.memory import address, is_page_aligned, page_lock, pinned
from mpitrain.cuda.streams import happened, make_event, make_stream
from mpitrain.errors import DeviceError
from mpitrain.waiting.control import until
from mpitrain.world import World

SLOTS = 4
# Not measured on a GPU yet. A smaller piece begins earlier on the wire; larger pieces need fewer starts.
LARGEST_PIECE_BYTES, SMALLEST_PIECE_BYTES = 4 * 2**20, 256 * 2**10
_PIECES = 4  # the least number of pieces of a buffer that has enough bytes for them


def staged(world: World, place: DevicePlace | None = None) -> DeviceSequential:
    """Through the host. See Algorithm for the contract; arrays are CuPy's.

    Raises:
        DeviceError: some rank has no GPU, or no page-locked memory. On every rank.
    """
    place = place or DevicePlace(world)
    algorithm = ALGORITHMS[world.config.algorithm].make(world)
    return DeviceSequential(world, place, "staged", staged_steps(world, place, algorithm.steps, algorithm))


def staged_steps(world: World, place: DevicePlace, host_sum: Steps, memory: Algorithm | None = None) -> Steps:
    """The pipeline around `host_sum`. Collective.

    Args:
        world: for errors that all ranks raise.
        place: the GPU, and the stream that the copies follow, and that follows the copies.
        host_sum: replaces a host array by its sum. If it sends a compressed form, the residual is on the host too.
        memory: makes host memory in which `host_sum` needs no copy.
    """
    gpu, runtime = place.gpu, cupy_module().cuda.runtime
    slots = _make_slots(world, memory)
    down, up = make_stream(gpu), make_stream(gpu)
    arrived = [make_event(gpu) for _ in slots]
    returned = [make_event(gpu) for _ in slots]
    filled, lifted = make_event(gpu), make_event(gpu)

    def steps(flat: Array, residual: numpy.ndarray | None = None) -> Progress:
        length = piece_bytes(flat.nbytes) // flat.itemsize
        pieces = [slice(begin, min(begin + length, flat.size)) for begin in range(0, flat.size, length)]
        source, itemsize = flat.data.ptr, flat.itemsize
        filled.record(place.stream)
        down.wait_event(filled)

        def fetch(number: int) -> None:
            piece, slot = pieces[number], number % SLOTS
            if number >= SLOTS:
                down.wait_event(returned[slot])
            size = (piece.stop - piece.start) * itemsize
            where = source + piece.start * itemsize
            runtime.memcpyAsync(address(slots[slot]), where, size, runtime.memcpyDeviceToHost, down.ptr)
            arrived[slot].record(down)

        # Data of the previous sum may still be on the way up; its slots are free after that.
        for event in returned:
            down.wait_event(event)
        for number in range(min(SLOTS, len(pieces))):
            fetch(number)
        for number, piece in enumerate(pieces):
            slot, count = number % SLOTS, piece.stop - piece.start
            yield from until(lambda slot=slot: happened(arrived[slot]))  # type: ignore[misc]
            host = slots[slot][: count * itemsize].view(flat.dtype)
            yield from host_sum(host, residual if residual is None else residual[piece])
            where = source + piece.start * itemsize
            runtime.memcpyAsync(where, address(host), host.nbytes, runtime.memcpyHostToDevice, up.ptr)
            returned[slot].record(up)
            if number + SLOTS < len(pieces):
                fetch(number + SLOTS)
        lifted.record(up)
        place.stream.wait_event(lifted)

    return steps


def piece_bytes(num_bytes: int) -> int:
    """The piece size for a buffer of so many bytes: a multiple of every dtype's size, the same on all ranks."""
    aimed = -(-num_bytes // _PIECES)
    return min(max(-(-aimed // 4096) * 4096, SMALLEST_PIECE_BYTES), LARGEST_PIECE_BYTES)


def _make_slots(world: World, memory: Algorithm | None) -> list[numpy.ndarray]:
    """Page-locked memory, if possible the memory that suits the host's algorithm best."""
    problem, slots = "", []
    dtype = numpy.dtype(numpy.uint8)
    made = [memory.allocate(LARGEST_PIECE_BYTES, dtype) for _ in range(SLOTS)] if memory is not None else []
    try:
        for slot in made:
            # Memory that ranks share begins at a page on all of them; a plain array may share its pages with others.
            if not is_page_aligned(slot):
                break
            try:
                page_lock(slot)
            except DeviceError as error:  # some drivers refuse shared memory
                print(f"mpitrain: {world.name()}: {error}; the sum copies once more", file=sys.stderr, flush=True)
                break
            slots.append(slot)
        slots += [pinned(LARGEST_PIECE_BYTES) for _ in range(SLOTS - len(slots))]
    except DeviceError as error:
        problem = str(error)
    raise_first(world, world.allgather(problem))
    return slots
