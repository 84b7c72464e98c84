"""Messages of frames between two ranks of a World, any number of bytes long.

    leader ── header: kind, lengths of the frames ──> worker      one message of 8-byte numbers
           ── frames, in pieces of at most 256 KiB ──>            by a Mover

Each direction has one message under way at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy

from mpitrain.remote.frames import Frames
from mpitrain.waiting.control import Control, until
from mpitrain.waiting.pace import patient_naps
from mpitrain.waiting.pieces import Mover
from mpitrain.watching.activity import count_moved

if TYPE_CHECKING:
    from mpi4py import MPI

# Kinds of messages. To a worker: a call; the end of the block, with or without freeing its communicator. Back: a result
# or a failure.
CALL, END, END_AS_IT_IS, RESULT, FAILURE = range(5)

_HEADER_TAG, _FRAMES_TAG = 1, 2
# A call waits for two naps, one on each side. With the usual naps that is more than 1 ms.
LONGEST_NAP_SECONDS = 100e-6

Message: TypeAlias = tuple[int, Frames]
Result = TypeVar("Result")


class RankLink:
    """This rank's end of the line to another rank."""

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        """`comm` is used by links alone. `peer` is the other rank."""
        self._comm = comm
        self._peer = peer
        self._mover = Mover(comm, _FRAMES_TAG)

    def send(self, kind: int, frames: Frames) -> Iterator[float | None]:
        """Steps that send a message. Until their end the frames must not change."""
        header = numpy.array([kind, *(frame.nbytes for frame in frames)], numpy.int64)
        yield from until(self._comm.Isend(header, self._peer, _HEADER_TAG).Test)
        yield from self._mover.move([(self._peer, frame) for frame in frames], [])

    def receive(self) -> Generator[float | None, None, Message]:
        """Steps that receive the next message, into new memory."""
        from mpi4py import MPI

        nap = patient_naps(LONGEST_NAP_SECONDS)
        while (message := self._comm.Improbe(self._peer, _HEADER_TAG, status := MPI.Status())) is None:
            yield nap()
        header = numpy.empty(status.Get_count(MPI.INT64_T), numpy.int64)
        message.Recv(header)
        count_moved()  # the frames follow at once: whoever naps between two looks stops that
        kind, *lengths = header.tolist()
        frames = [numpy.empty(length, numpy.uint8) for length in lengths]
        yield from self._mover.move([], [(self._peer, frame) for frame in frames])
        return kind, frames


def driven(
    control: Control,
    steps: Generator[float | None, None, Result],
    doing: str,
    peers: Collection[int],
) -> Result:
    """Wait for the end of `steps`, and return their result. Arguments and errors are those of Control.wait."""
    results: list[Result] = []

    def kept() -> Iterator[float | None]:
        results.append((yield from steps))

    control.wait(kept(), doing, peers)
    return results[0]
