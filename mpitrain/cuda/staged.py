"""staged: through page-locked CPU memory, piece by piece, so that copies in both directions overlap with the network.

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
from collections.abc import Callable

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Algorithm, AllreduceHandle, Progress, Steps
from mpitrain.arrays import Array
from mpitrain.cuda.device import cupy_module, raise_first
from mpitrain.cuda.memory import address, is_page_aligned, page_lock, pinned
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential, refuse
from mpitrain.cuda.streams import happened, make_event, make_stream, mark
from mpitrain.errors import DeviceError
from mpitrain.waiting.control import until
from mpitrain.world.world import World

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
        host_sum: replaces a host array by its sum. If it compresses, the residual is also in CPU memory.
        memory: makes host memory in which `host_sum` needs no copy.
    """
    gpu, runtime = place.gpu, cupy_module().cuda.runtime
    slots = _page_locked(world, memory, LARGEST_PIECE_BYTES, SLOTS)
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


class ThroughHost:
    """Sums of GPU buffers that the CPU computes from copies of whole buffers: for codecs without kernels, for example.

    Results and residuals are bitwise identical to those of CPU arrays. The residuals stay in CPU memory.
    """

    def __init__(self, world: World, name: str, memory: Algorithm) -> None:
        """Collective. `memory` makes the host's copies.

        Raises:
            DeviceError: some rank has no GPU, or the setting `transport` asks for another transport. Raised on every
                rank.
        """
        asked, place = world.config.transport, DevicePlace(world)
        problem = f"compression {name} runs on the CPU; use auto or staged with it"
        refuse(world, asked, "" if asked in ("auto", "staged") else problem)
        self._transport = DeviceSequential(world, place, name)
        self._world, self._memory = world, memory

    def allocate(self, count: int, dtype: numpy.dtype) -> tuple[Array, numpy.ndarray]:
        """Make a buffer on the GPU, and its copy on the host. Collective.

        Raises:
            DeviceError: some rank lacks the memory, on its GPU or page-locked. Raised on every rank.
        """
        flat = self._transport.allocate(count, dtype)
        (copy,) = _page_locked(self._world, self._memory, count * dtype.itemsize, 1)
        return flat, copy.view(dtype)

    def start(self, flat: Array, host: numpy.ndarray, work: Callable[[], Progress]) -> AllreduceHandle:
        """Begin to replace `flat`: it is copied to `host`, its copy; `work` replaces `host`, which is copied back."""
        steps = self._steps(flat, host, work) if flat.size else iter(())
        return self._transport.begin(flat, steps, (flat, host), agreed=True)

    def _steps(self, flat: Array, host: numpy.ndarray, work: Callable[[], Progress]) -> Progress:
        runtime, place = cupy_module().cuda.runtime, self._transport.place
        runtime.memcpyAsync(address(host), flat.data.ptr, host.nbytes, runtime.memcpyDeviceToHost, place.stream.ptr)
        arrived = mark(place.gpu, place.stream)
        # What went up before has left the host's memory by then, too.
        yield from until(lambda: happened(arrived))
        yield from work()
        runtime.memcpyAsync(flat.data.ptr, address(host), host.nbytes, runtime.memcpyHostToDevice, place.stream.ptr)


def piece_bytes(num_bytes: int) -> int:
    """The piece size for a buffer of `num_bytes` bytes: a multiple of every dtype's size, the same on all ranks."""
    aimed = -(-num_bytes // _PIECES)
    return min(max(-(-aimed // 4096) * 4096, SMALLEST_PIECE_BYTES), LARGEST_PIECE_BYTES)


def _page_locked(world: World, memory: Algorithm | None, num_bytes: int, number: int) -> list[numpy.ndarray]:
    """So many bytes of page-locked memory, so often; if possible the memory that suits the host's algorithm best."""
    problem, made = "", []
    dtype = numpy.dtype(numpy.uint8)
    suitable = [memory.allocate(num_bytes, dtype) for _ in range(number)] if memory is not None else []
    try:
        for one in suitable:
            # Memory that ranks share begins at a page on all of them; a plain array may share its pages with others.
            if not is_page_aligned(one) or not num_bytes:
                break
            try:
                page_lock(one)
            except DeviceError as error:  # some drivers refuse shared memory
                print(f"mpitrain: {world.name()}: {error}; the sum copies once more", file=sys.stderr, flush=True)
                break
            made.append(one)
        made += [pinned(num_bytes) for _ in range(number - len(made))]
    except DeviceError as error:
        problem = str(error)
    raise_first(world, world.allgather(problem))
    return made
