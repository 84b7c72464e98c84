"""Transfers of any number of bytes, and of Python objects, from rank to rank.

MPI libraries that count in 32 bits refuse 2 GiB at once.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from mpitrain.errors import MismatchError
from mpitrain.waiting.control import Control, patient_naps, until

if TYPE_CHECKING:
    from mpi4py import MPI

# The most that one call moves, in bytes (or elements); a test lowers this limit.
AT_ONCE = 2**30
# The most that one wait for a broadcast moves, in bytes. At 100 Mbit/s that takes some seconds. A longer wait would be
# reported as a hang.
WAITED_AT_ONCE = 2**24

# Tags below this one belong to the algorithms, which share the communicator with the user's messages.
_USER_TAG = 1000
_LARGEST_TAG = 32767 - _USER_TAG  # MPI promises tags up to 32767 (MPI-4.1, section 9.1.2), and no more

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


class Messages:
    """The sends and receives of one rank. `World.send` and `World.recv` document them."""

    def __init__(self, comm: MPI.Comm, control: Control) -> None:
        self._comm = comm
        self._control = control
        self._to_myself: defaultdict[int, deque[bytes]] = defaultdict(deque)  # sent and not yet received, by tag

    def send(self, value: Any, to: int, tag: int) -> None:
        """Send `value`, and wait until it has been sent."""
        self._check_tag(tag)
        if to == self._control.rank:  # MPI would wait for a receive that this call itself delays
            self._to_myself[tag].append(pickle.dumps(value, protocol=5))
            return
        self._control.check()
        request = self._comm.isend(value, to, _USER_TAG + tag)
        self._control.wait(until(lambda: request.test()[0]), f"send to {self._control.name(to)}", (to,))

    def recv(self, source: int, tag: int) -> Any:
        """Wait for the next object."""
        self._check_tag(tag)
        control = self._control
        if source == control.rank:
            if not self._to_myself[tag]:
                raise MismatchError(
                    f"{control.name()}: receives from itself, and has sent itself nothing with tag {tag}"
                )
            return pickle.loads(self._to_myself[tag].popleft())
        message: MPI.Message | None = None

        def arrived() -> bool:
            nonlocal message
            message = self._comm.improbe(source, _USER_TAG + tag)
            return message is not None

        control.wait(until(arrived, patient_naps()), f"recv from {control.name(source)}", (source,))
        assert message is not None
        return message.recv()

    def _check_tag(self, tag: int) -> None:
        # A negative one could match messages of an algorithm.
        if not 0 <= tag <= _LARGEST_TAG:
            raise ValueError(f"{self._control.name()}: tag={tag}; tags are 0 to {_LARGEST_TAG}")
