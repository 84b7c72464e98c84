"""Tensors from one rank to another: send and recv with tags, and recv from any rank.

A receive is matched when a message has arrived (MPI_Improbe). So its size can be compared, and a receive without a
message can be given up. The order is MPI's: if a message matches two receives, the one that began first gets it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy

from mpitrain.errors import MismatchError
from mpitrain.waiting import transfer

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.torch.work import Call
    from mpitrain.world.world import World

_PROMISED_TAG = 32767  # the largest tag that MPI guarantees (MPI-4.1, section 9.1.2)
FIRST_TAG = 1000  # lower tags belong to the algorithms, which share the communicator


@dataclass(eq=False)
class _Transfer:
    call: Call
    left: list[numpy.ndarray]  # pieces that have not been begun, the last piece first
    requests: list[MPI.Request] = field(default_factory=list)
    source: int = -1  # the source, or the target of a send
    tag: int = 0
    problem: MismatchError | None = None


class Peers:
    """The sends and receives of one group."""

    def __init__(self, world: World) -> None:
        from mpi4py import MPI

        self._world = world
        self._comm = world.comm
        self._sends: list[_Transfer] = []
        self._receives: list[_Transfer] = []  # in the order in which they were begun
        self._changing = threading.Lock()
        self._any = MPI.ANY_SOURCE
        self.largest_tag = int(self._comm.Get_attr(MPI.TAG_UB) or _PROMISED_TAG) - FIRST_TAG

    @property
    def is_busy(self) -> bool:
        """True if a transfer is under way."""
        return bool(self._sends or self._receives)

    def others(self, call: Call) -> tuple[int, ...] | None:
        """Return the peer of a send or receive: one rank, or () for a receive from any rank; None for another call."""
        for pending in (*self._sends, *self._receives):
            if pending.call is call:
                return () if pending.source == self._any else (pending.source,)
        return None

    def send(self, call: Call, data: numpy.ndarray, to: int, tag: int) -> None:
        """Begin to send bytes."""
        with self._changing:
            pieces = _pieces(data)
            requests = [self._comm.Isend(piece, to, FIRST_TAG + tag) for piece in reversed(pieces)]
            self._sends.append(_Transfer(call, [], requests, source=to))

    def receive(self, call: Call, data: numpy.ndarray, source: int | None, tag: int) -> None:
        """Begin to receive bytes, from any rank if `source` is None."""
        with self._changing:
            source = self._any if source is None else source
            self._receives.append(_Transfer(call, _pieces(data), source=source, tag=tag))

    def look(self) -> list[tuple[Call, MismatchError | None]]:
        """Make progress without waiting. Return the calls that have ended, with their errors."""
        ended: list[tuple[Call, MismatchError | None]] = []
        if not self._changing.acquire(blocking=False):
            return ended
        try:
            for pending in tuple(self._sends):
                if all(request.Test() for request in pending.requests):
                    self._sends.remove(pending)
                    ended.append((pending.call, None))
            taken: set[tuple[int, int]] = set()  # source and tag of earlier receives
            for pending in tuple(self._receives):
                if pending.left and not self._match(pending, taken):
                    taken.add((pending.source, pending.tag))
                elif all(request.Test() for request in pending.requests):
                    self._receives.remove(pending)
                    ended.append((pending.call, pending.problem))
        finally:
            self._changing.release()
        return ended

    def give_up(self, call: Call) -> bool:
        """Give up a receive for which no message has come. Return whether the call was such a receive."""
        with self._changing:
            for pending in self._receives:
                if pending.call is call and not pending.requests:
                    self._receives.remove(pending)
                    return True
        return False

    def take_in(self, source: int, tag: int, count: int) -> None:
        """Receive and discard `count` messages of 8 bytes that are in flight."""
        for _ in range(count):
            self._comm.Recv(numpy.empty(1, numpy.int64), source, FIRST_TAG + tag)

    def _match(self, pending: _Transfer, taken: set[tuple[int, int]]) -> bool:
        """Begin to receive the message that has arrived for a receive. Return whether that completes it."""
        from mpi4py import MPI

        while pending.left:
            if (self._any, pending.tag) in taken or (pending.source, pending.tag) in taken:
                return False
            status = MPI.Status()
            source = pending.source
            if source == self._any:
                if not self._comm.Iprobe(self._any, FIRST_TAG + pending.tag, status):
                    return False
                source = status.source
                if (source, pending.tag) in taken:  # an earlier receive from this very rank gets the message
                    return False
            message = self._comm.Improbe(source, FIRST_TAG + pending.tag, status)
            if message is None:
                return False
            pending.source = pending.call.source = source
            piece = pending.left.pop()
            sent_bytes = status.Get_count(MPI.BYTE)
            if sent_bytes != piece.nbytes:
                world = self._world
                pending.problem = MismatchError(
                    f"{world.name()}: {pending.call} of {piece.nbytes} bytes, but {world.name(source)} has sent "
                    f"{sent_bytes} bytes; both must have as many elements of the same dtype"
                )
                piece = numpy.empty(sent_bytes, numpy.uint8)
                pending.left.clear()
            pending.requests.append(message.Irecv(piece))
        return True


def _pieces(data: numpy.ndarray) -> list[numpy.ndarray]:
    """Cut the data into pieces, at least one, and return the last piece first."""
    begins = range(0, max(data.size, 1), transfer.AT_ONCE)
    return [data[begin : begin + transfer.AT_ONCE] for begin in reversed(begins)]
