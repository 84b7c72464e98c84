"""Any number of bytes from rank to rank: MPI libraries that count in 32 bits refuse 2 GiB at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from mpitrain.waiting.control import until

if TYPE_CHECKING:
    from mpi4py import MPI

# The most that one call moves, in bytes (or elements); a test lowers this limit.
AT_ONCE = 2**30
# The most that one wait for a broadcast moves, in bytes. At 100 Mbit/s that takes some seconds. A longer wait would be
# reported as one in which nothing moves.
WAITED_AT_ONCE = 2**24

# Control.wait
Wait: TypeAlias = "Callable[[Iterable[float | None], str], None]"


def broadcast_bytes(comm: MPI.Comm, buffer: Any, root: int, wait: Wait) -> None:
    """Overwrite `buffer` with `root`'s: a bytearray or byte array, equally long on all ranks."""
    from mpi4py import MPI

    view = memoryview(buffer)
    length = min(AT_ONCE, WAITED_AT_ONCE)
    for begin in range(0, len(view), length):
        part = view[begin : begin + length]
        wait(until(comm.Ibcast([part, MPI.BYTE], root).Test), f"broadcast from rank {root}")


def gather_bytes(comm: MPI.Comm, own: bytes, wait: Wait, sizes: Sequence[int] | None = None) -> list[bytes]:
    """Return every rank's bytes, on every rank. `sizes` are their lengths by rank, if known already."""
    from mpi4py import MPI

    if sizes is None:
        lengths = numpy.empty(comm.size, numpy.int64)
        request = comm.Iallgather(numpy.array([len(own)], numpy.int64), lengths)
        wait(until(request.Test), "gather the sizes of messages")
        sizes = lengths.tolist()
    if sum(sizes) > AT_ONCE:
        contents = [bytearray(own if rank == comm.rank else size) for rank, size in enumerate(sizes)]
        for rank, content in enumerate(contents):
            broadcast_bytes(comm, content, rank, wait)
        return [bytes(content) for content in contents]
    starts = [sum(sizes[:rank]) for rank in range(comm.size)]
    joined = bytearray(sum(sizes))
    request = comm.Iallgatherv([own, MPI.BYTE], [joined, (sizes, starts), MPI.BYTE])
    wait(until(request.Test), "gather messages")
    return [bytes(joined[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
