"""GPU memory that all ranks of a node share: data that one rank writes, the others read without a copy (CUDA IPC).

Each rank makes a block of its own (cudaMalloc) and opens the others' blocks. This module follows these rules of CUDA:

- Every process that has opened a block closes it before its owner frees it. So a block whose array is gone stays until
  the next allocation. There, all ranks learn which blocks are gone everywhere, close them, meet, and free them.
- A stream waits for the state that another process's event has at the time of the call. So a message that the event has
  been recorded comes first.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.device import Gpu, cupy_module
from mpitrain.cuda.memory import array_in, explained, open_block, raw
from mpitrain.cuda.streams import make_event
from mpitrain.errors import DeviceError, everywhere
from mpitrain.waiting.control import until

if TYPE_CHECKING:
    from mpi4py import MPI

# cudaMalloc may cut smaller allocations out of a larger block, and give that block's handle (CUDA Programming Guide).
_GRAIN_BYTES = 2**21
HANDLE_BYTES = 64  # the size of handles of memory and events (cudaIpcMemHandle_t, cudaIpcEventHandle_t)


@dataclass(frozen=True)
class Mates:
    """The ranks of a node, in their order, and this rank's place among them."""

    comm: MPI.Comm
    members: tuple[int, ...]
    index: int
    tag: int  # the tag of their messages here


class _Block(NamedTuple):
    """One allocation, of equal size on every mate."""

    number: int
    num_bytes: int
    memory: Any  # this rank's block
    pointers: list[int]  # the blocks' addresses, in the mates' order
    lease: weakref.ref[_Lease]  # dead when no array lies in the block any more


class _Lease:
    """The object that the arrays of a block keep alive."""


@dataclass
class _Held:
    """The CUDA resources of a PeerMemory."""

    gpu: Gpu
    blocks: dict[int, _Block] = field(default_factory=dict)  # by the address of this rank's block
    opened: dict[int, list[int]] = field(default_factory=dict)  # the mates' blocks, by the same address


# Resources of deleted objects. Closing and freeing them waits for the GPU, which may wait for a mate, which may wait
# for this rank. So it must not happen during garbage collection, at any point of the program. It happens in the next
# allocation, when no message is in flight.
_left: list[_Held] = []


class PeerMemory:
    """The blocks of one transport. All mates call `allocate` together, in the same order."""

    def __init__(self, gpu: Gpu, mates: Mates) -> None:
        self._gpu = gpu
        self._mates = mates
        self._number = 0
        held = _Held(gpu)
        self._blocks, self._opened = held.blocks, held.opened
        self._begins: list[int] = []
        weakref.finalize(self, _left.append, held).atexit = False

    def allocate(self, num_bytes: int) -> Generator[float | None, None, Array]:
        """Work whose result is this rank's part, uint8[num_bytes] on the GPU, uninitialised.

        Raises:
            DeviceError: a rank lacks the memory, or cannot open a mate's. Raised on all mates, with the text of the
                first such rank.
        """
        _free_what_is_left()
        yield from self._free_what_is_gone()
        mates, gpu = self._mates, self._gpu
        memory: Any = None
        handle, problem = bytes(HANDLE_BYTES), ""
        try:
            memory = raw(
                gpu, max(1, -(-num_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES, "a bucket that the ranks of a node share"
            )
            handle = _exported(memory.ptr)
        except DeviceError as error:
            problem = str(error)
        # All mates learn of a problem before any of them opens a block.
        yield from raise_among(mates, problem)
        handles = yield from exchange(mates, handle)
        pointers: list[int] = []
        try:
            for place, handle in enumerate(handles):
                pointers.append(int(memory.ptr) if place == mates.index else open_block(gpu, handle))
        except DeviceError as error:
            problem = str(error)
            pointers += [0] * (len(handles) - len(pointers))
        try:
            yield from raise_among(mates, problem)
        except DeviceError:
            # Close what this rank could open before its owner frees the block.
            _close(gpu, [pointer for pointer in pointers if pointer not in (0, int(memory.ptr))])
            yield from exchange(mates, bytes(1))
            raise
        lease = _Lease()
        block = _Block(self._number, num_bytes, memory, pointers, weakref.ref(lease))
        self._number += 1
        address = int(memory.ptr)
        self._blocks[address] = block
        self._opened[address] = [pointer for pointer in pointers if pointer != address]
        bisect.insort(self._begins, address)
        return array_in(gpu, address, num_bytes, lease)

    def place_of(self, flat: Array) -> tuple[int, int]:
        """Return the number of the array's block, equal on all mates, and its offset; (-1, 0) if it lies in none."""
        begin = flat.data.ptr
        place = bisect.bisect(self._begins, begin) - 1
        if place >= 0:
            block = self._blocks[self._begins[place]]
            offset = begin - self._begins[place]
            if offset + flat.nbytes <= block.num_bytes:
                return block.number, offset
        return -1, 0

    def mates_arrays(self, flat: Array) -> list[Array]:
        """Return the same place in every mate's block as that of `flat`, which lies in a block; in the mates' order."""
        number, offset = self.place_of(flat)
        block = next(block for block in self._blocks.values() if block.number == number)
        return [
            flat
            if index == self._mates.index
            else array_in(self._gpu, pointer + offset, flat.nbytes, block.memory).view(flat.dtype)
            for index, pointer in enumerate(block.pointers)
        ]

    def _free_what_is_gone(self) -> Iterator[float | None]:
        """Free the blocks in which no rank has an array any more."""
        gone = [block.number for block in self._blocks.values() if block.lease() is None]
        texts = yield from exchange_any(self._mates, numpy.array(gone, numpy.int64).tobytes())
        everywhere = set.intersection(*(set(numpy.frombuffer(text, numpy.int64).tolist()) for text in texts))
        blocks = {address: block for address, block in self._blocks.items() if block.number in everywhere}
        if not blocks:
            return
        with self._gpu.current():
            # This rank's own work on them must be complete.
            cupy_module().cuda.runtime.deviceSynchronize()
        for address in blocks:
            _close(self._gpu, self._opened.pop(address))
        yield from exchange(self._mates, bytes(1))
        for address in blocks:
            del self._blocks[address]
            self._begins.remove(address)


class PeerEvents:
    """One event per mate; all mates can wait for them."""

    def __init__(self, gpu: Gpu, handles: list[bytes], own: Any, index: int) -> None:
        """`handles` are the mates' handles in their order; `own` is this rank's event."""
        self._gpu = gpu
        self._own = own
        runtime = cupy_module().cuda.runtime
        with gpu.current():
            self._events_of_others = [
                runtime.ipcOpenEventHandle(text) for at, text in enumerate(handles) if at != index
            ]
        weakref.finalize(self, _destroy, runtime, self._events_of_others).atexit = False

    def record(self, stream: Any) -> None:
        """Record this rank's event in the stream. A message to the mates must follow."""
        self._own.record(stream)

    def hold(self, stream: Any) -> None:
        """Let later work in the stream begin after every mate's event, as it was last recorded."""
        runtime = cupy_module().cuda.runtime
        for event in self._events_of_others:
            runtime.streamWaitEvent(stream.ptr, event, 0)


def make_events(gpu: Gpu, mates: Mates, number: int) -> Generator[float | None, None, list[PeerEvents]]:
    """Make `number` events. All mates call this together.

    Raises:
        DeviceError: a rank cannot open a mate's event. Raised on all mates, with the text of the first such rank.
    """
    runtime = cupy_module().cuda.runtime
    made: list[PeerEvents] = []
    own = [make_event(gpu, interprocess=True) for _ in range(number)]
    own_handles = b"".join(_event_handle(runtime, event) for event in own)
    everybody = yield from exchange(mates, own_handles)
    problem = ""
    try:
        with explained(f"{gpu} cannot wait for another rank's GPU", "; are the ranks in different containers?"):
            for at, event in enumerate(own):
                part = slice(at * HANDLE_BYTES, (at + 1) * HANDLE_BYTES)
                made.append(PeerEvents(gpu, [text[part] for text in everybody], event, mates.index))
    except DeviceError as error:
        problem = str(error)
    yield from raise_among(mates, problem)
    return made


def exchange(mates: Mates, own: bytes) -> Generator[float | None, None, list[bytes]]:
    """Return every mate's bytes, of equal length on all, in the mates' order. This is also a barrier."""
    rows = numpy.empty((len(mates.members), max(len(own), 1)), numpy.uint8)
    rows[mates.index, : len(own)] = numpy.frombuffer(own, numpy.uint8)
    sent = rows[mates.index].copy()
    requests: list[MPI.Request] = []
    for place, rank in enumerate(mates.members):
        if place != mates.index:
            requests.append(mates.comm.Isend(sent, rank, mates.tag))
            requests.append(mates.comm.Irecv(rows[place], rank, mates.tag))
    for request in requests:
        yield from until(request.Test)
    return [row.tobytes()[: len(own)] for row in rows]


def exchange_any(mates: Mates, own: bytes) -> Generator[float | None, None, list[bytes]]:
    """Do the same for bytes of any length."""
    lengths = yield from exchange(mates, len(own).to_bytes(8, "little"))
    numbers = [int.from_bytes(text, "little") for text in lengths]
    longest = max(numbers)
    if longest == 0:
        return [b""] * len(numbers)
    padded = yield from exchange(mates, own.ljust(longest, b"\0"))
    return [text[:number] for text, number in zip(padded, numbers, strict=True)]


def raise_among(mates: Mates, problem: str) -> Generator[float | None, None, None]:
    """Raise DeviceError on all mates if one has a problem; "" means none."""
    texts = yield from exchange_any(mates, problem.encode())
    for rank, text in zip(mates.members, texts, strict=True):
        if text:
            raise everywhere(DeviceError(f"rank {rank}: {text.decode()}"), len(mates.members) == mates.comm.size)


def _close(gpu: Gpu, pointers: list[int]) -> None:
    runtime = cupy_module().cuda.runtime
    with gpu.current():
        for pointer in pointers:
            runtime.ipcCloseMemHandle(pointer)


def _free_what_is_left() -> None:
    """Close opened blocks, and free this rank's blocks in which no array lies any more."""
    for held in tuple(_left):
        with held.gpu.current():
            cupy_module().cuda.runtime.deviceSynchronize()
        for pointers in held.opened.values():
            _close(held.gpu, pointers)
        held.opened.clear()
        for address, block in tuple(held.blocks.items()):
            if block.lease() is None:
                del held.blocks[address]
        if not held.blocks:
            _left.remove(held)


def _exported(pointer: int) -> bytes:
    with explained("this GPU's memory cannot be shared between processes"):
        return bytes(cupy_module().cuda.runtime.ipcGetMemHandle(pointer))


def _event_handle(runtime: Any, event: Any) -> bytes:
    return bytes(runtime.ipcGetEventHandle(event.ptr))


def _destroy(runtime: Any, events: list[int]) -> None:
    for event in events:
        runtime.eventDestroy(event)
