"""Short notes between all ranks of a job beside the collectives: "I failed", "I have finished".

A rank that waits in a collective for a rank that has left would wait for ever, and MPI has no word for it. So every
wait in mpitrain, in whichever World of the job, goes through `Control.wait`, which now and then looks for such notes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from mpi4py import MPI

FAILED, FINISHED = 1, 2


@dataclass(frozen=True)
class Note:
    """What a rank tells all others, and when (seconds since the epoch, by the rank's clock).

    Attributes:
        rank: the rank in the World that the job began with.
        made: FINISHED only: how many calls the rank had begun in each World, by the World's number.
        cause: failures only: a number that is equal for equal errors; 0 to 2^52.
        seen_seconds: this rank's perf_counter() when the note was read.
    """

    kind: int
    rank: int
    made: Mapping[int, int]
    sent_seconds: float
    cause: int
    seen_seconds: float


class Notes:
    """The notes of one job: all its Worlds share them.

    Attributes:
        rank: of this process in the World that the job began with; known here also when MPI is gone.
        size: the number of ranks that are left of it.
        read: the notes that have come in, by rank.
        made: how many calls this rank has begun in each World so far, by the World's number; also in those that are
            freed, where other ranks may still be waiting.
    """

    def __init__(self, comm: MPI.Comm, members: Sequence[int]) -> None:
        """`comm` has all ranks of the job that are left, and is for the notes alone. `members` are their numbers."""
        self._members = tuple(members)
        self.rank, self.size = self._members[comm.rank], len(self._members)
        self.read: dict[int, Note] = {}
        self.made: dict[int, int] = {}
        self._comm = comm
        self._in_flight: list[tuple[int, MPI.Request, numpy.ndarray]] = []  # each with the rank that it goes to
        self._in_vain: list[tuple[int, MPI.Request, numpy.ndarray]] = []  # to ranks that are gone: MPI may use them

    def tell_all(self, kind: int, cause: int = 0, *, last: bool = False) -> Note:
        """Send a note to every other rank, without waiting. `is_unread` tells when it has come.

        `last` gives the note a later date than all others.
        """
        sent_seconds = float("inf") if last else time.time()
        made = dict(self.made) if kind == FINISHED else {}
        pairs = [number for pair in made.items() for number in pair]
        message = numpy.array([kind, sent_seconds, cause, *pairs], numpy.float64)
        for place, rank in enumerate(self._members):
            if rank != self.rank:
                # A synchronous send: any other may be complete while the message is still in this process.
                self._in_flight.append((rank, self._comm.Issend(message, place, tag=0), message))
        return Note(kind, self.rank, made, sent_seconds, cause, time.perf_counter())

    def is_unread(self, gone: Collection[int] = ()) -> bool:
        """Whether a rank has yet to read what this rank has told. Those that are `gone` read nothing more."""
        from mpi4py import MPI

        left = []
        for one in self._in_flight:
            rank, request, _ = one
            if rank in gone:
                self._in_vain.append(one)
                continue
            try:
                if not request.Test():
                    left.append(one)
            except MPI.Exception as error:
                # The other rank is gone, for an MPI that goes on after that.
                if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
                    raise
        self._in_flight = left
        return bool(left)

    def look(self) -> None:
        """Read the notes that have arrived."""
        from mpi4py import MPI

        # A matched probe: a failing thread also looks for notes, and each note must go to the thread that found it.
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, 0, status := MPI.Status())) is not None:
            numbers = numpy.empty(status.Get_count(MPI.DOUBLE))
            message.Recv(numbers)
            kind, sent_seconds, cause, *pairs = numbers.tolist()
            made = {int(number): int(calls) for number, calls in zip(pairs[::2], pairs[1::2], strict=True)}
            # A failure after a farewell replaces it; the reverse cannot happen.
            rank = self._members[status.source]
            self.read[rank] = Note(int(kind), rank, made, sent_seconds, int(cause), time.perf_counter())

    def lost(self) -> list[int]:
        """The ranks that are gone, for an MPI that goes on after the loss of a process. `look` fails no more for them.

        (MPI_Comm_ack_failed of MPI 5.0's ULFM: without it, no message from just any rank can be received.)
        """
        self._comm.Ack_failed()
        gone, everyone = self._comm.Get_failed(), self._comm.Get_group()
        try:
            return [self._members[place] for place in gone.Translate_ranks(range(gone.size), everyone)]
        finally:
            gone.Free()
            everyone.Free()

    def begin_barrier(self) -> MPI.Request:
        """A separate barrier, beside the Worlds' collectives, in which other ranks may still be."""
        return self._comm.Ibarrier()
