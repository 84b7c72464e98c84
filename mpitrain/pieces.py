"""Arrays from rank to rank in pieces: some at a time, both ways at once, no message a large one.

Over TCP, MPI libraries send large messages one way at a time (docs/traps.md), and none counts beyond 2^31 bytes
everywhere. Pieces avoid both, and additions overlap transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy

from mpitrain.launch.activity import count_moved
from mpitrain.pace import Pace

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 2**18
AHEAD = 4  # pieces posted for receiving, and at most in sending, at one time

# The other rank, and the array for it or from it: flat and contiguous.
Part: TypeAlias = tuple[int, numpy.ndarray]


class Mover:
    """Moves arrays over one communicator. Its scratch memory is made once, and grows to AHEAD pieces."""

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm = comm
        self._tag = tag
        self._scratch = numpy.empty(0, numpy.uint8)
        self._pace = Pace()

    def move(
        self,
        sends: Sequence[Part],
        receives: Sequence[Part],
        *,
        add: Callable[[numpy.ndarray, numpy.ndarray], None] | None = None,
        same: bool = False,
        forward: bool = False,
    ) -> Iterator[float]:
        """Send and receive all of these, in this order on each side; yields while it has to wait.

        Args:
            sends: what goes to which rank; read until the end.
            receives: what comes from which rank; overwritten.
            add: is called for each piece, with what is there and with what has come, in place of overwriting.
            same: what is added to is what is sent.
            forward: what is sent is what is received.
        """
        comm, tag = self._comm, self._tag
        to_send, to_receive = _cut(sends), _cut(receives)
        slots = self._slots(max((part.nbytes for _, part in to_receive), default=0)) if add else []
        sending: deque[MPI.Request] = deque()
        receiving: deque[tuple[MPI.Request, numpy.ndarray]] = deque()
        posted = received = started = sent = 0
        self._pace.begin(sum(part.nbytes for _, part in to_receive), PIECE_BYTES)
        while received < len(to_receive) or sent < len(to_send):
            while posted < min(len(to_receive), received + AHEAD):
                source, piece = to_receive[posted]
                into = slots[posted % AHEAD][: piece.nbytes].view(piece.dtype) if add else piece
                receiving.append((comm.Irecv(into.view(numpy.uint8), source, tag), into))
                posted += 1
            while started < min(len(to_send), sent + AHEAD) and (not forward or started < received):
                target, piece = to_send[started]
                sending.append(comm.Isend(piece.view(numpy.uint8), target, tag))
                started += 1
            progress = False
            while sending and sending[0].Test():
                sending.popleft()
                sent += 1
                progress = True
            # What is added to while it is being sent would arrive changed.
            if receiving and (not same or received < sent) and receiving[0][0].Test():
                _, arrived = receiving.popleft()
                if add:
                    add(to_receive[received][1], arrived)
                received += 1
                progress = True
            if progress:
                count_moved()
            else:
                yield self._pace.nap()
        self._pace.end()

    def _slots(self, nbytes: int) -> list[numpy.ndarray]:
        each = -(-nbytes // 64) * 64  # so that every one is aligned
        if self._scratch.size < AHEAD * each:
            self._scratch = numpy.empty(AHEAD * each, numpy.uint8)
        return [self._scratch[i * each : (i + 1) * each] for i in range(AHEAD)]


def _cut(parts: Sequence[Part]) -> list[Part]:
    return [
        (rank, whole[begin : begin + length])
        for rank, whole in parts
        for length in [max(1, PIECE_BYTES // whole.itemsize)]
        for begin in range(0, whole.size, length)
    ]
