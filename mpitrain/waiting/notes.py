"""Short notes between all ranks of a job beside the collectives: "I failed", "I have finished".

A rank that waits in a collective for a rank that has left would wait for ever, and MPI does not report this. So every
wait in mpitrain, in whichever World of the job, goes through `Control.wait`, which now and then looks for such notes.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from mpi4py import MPI

FAILED, FINISHED = 1, 2
_BYTES = 6  # of a text in each number: a float64 keeps 53 bits


@dataclass(frozen=True)
class Note:
    """A rank's message to all others, with its time (seconds since the epoch, by the rank's clock).

    Attributes:
        rank: the rank in the World that the job began with.
        made: FINISHED only: how many calls the rank had begun in each World, by the World's number.
        final: FINISHED only: see Notes.
        cause: of a failure: a number that is equal for equal errors; 0 to 2^52. FINISHED: the exit code of the rank.
        seen_seconds: this rank's perf_counter() when the note was read.
    """

    kind: int
    rank: int
    made: Mapping[int, int]
    final: Mapping[int, tuple[float, ...]]
    sent_seconds: float
    cause: int
    seen_seconds: float

    @property
    def is_last(self) -> bool:
        """True if the failure is a consequence of another rank's."""
        return self.sent_seconds == float("inf")


class Notes:
    """The notes of one job: all its Worlds share them.

    Attributes:
        rank: of this process in the World that the job began with; known here also when MPI is gone.
        size: the number of its remaining ranks.
        read: the received notes, by rank.
        made: how many calls this rank has begun in each World so far, by the World's number; also in those that are
            freed, where other ranks may still be waiting.
        final: values that ranks compare when all have finished, or functions that return them then, by a number that is
            the same on all ranks; see job/job.py. () is equal to everything. 0 is for reducer/unexchanged.py.
    """

    def __init__(self, comm: MPI.Comm, members: Sequence[int]) -> None:
        """`comm` has all remaining ranks of the job, and is used for the notes only. `members` are their numbers."""
        self._members = tuple(members)
        self.rank, self.size = self._members[comm.rank], len(self._members)
        self.read: dict[int, Note] = {}
        self.made: dict[int, int] = {}
        self.final: dict[int, tuple[float, ...] | Callable[[], tuple[float, ...]]] = {}
        self._comm = comm
        self._said: list[MPI.Request] = []
        self._saying = threading.Lock()
        self._in_flight: list[tuple[int, MPI.Request, numpy.ndarray]] = []  # each with the rank that it goes to
        self._in_vain: list[tuple[int, MPI.Request, numpy.ndarray]] = []  # to ranks that are gone: MPI may use them

    def tell_all(self, kind: int, cause: int = 0, *, last: bool = False) -> Note:
        """Send a note to every other rank, without waiting. `is_unread` tells whether it has been read.

        `last` gives the note a later time than all others.
        """
        sent_seconds = float("inf") if last else time.time()
        made, final = (dict(self.made), self._last_values()) if kind == FINISHED else ({}, {})
        pairs = [number for pair in made.items() for number in pair]
        rest = [number for at, values in final.items() for number in (at, len(values), *values)]
        message = numpy.array([kind, sent_seconds, cause, len(made), *pairs, *rest], numpy.float64)
        for place, rank in enumerate(self._members):
            if rank != self.rank:
                # A synchronous send: any other may be complete while the message is still in this process.
                self._in_flight.append((rank, self._comm.Issend(message, place, tag=0), message))
        return Note(kind, self.rank, made, final, sent_seconds, cause, time.perf_counter())

    def _last_values(self) -> dict[int, tuple[float, ...]]:
        # Copies, here and in the functions: threads of the program may still make calls.
        return {number: values() if callable(values) else values for number, values in self.final.copy().items()}

    def is_unread(self, gone: Collection[int] = ()) -> bool:
        """Whether a rank has yet to read this rank's notes. Ranks in `gone` read nothing more."""
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
                # The other rank is gone, for an MPI that continues after that.
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
            kind, sent_seconds, cause, num_made, *rest = numbers.tolist()
            made = {int(rest.pop(0)): int(rest.pop(0)) for _ in range(int(num_made))}
            final: dict[int, tuple[float, ...]] = {}
            while rest:
                number, length = int(rest.pop(0)), int(rest.pop(0))
                final[number], rest = tuple(rest[:length]), rest[length:]
            # A failure after a farewell replaces it; the reverse cannot happen.
            rank = self._members[status.source]
            self.read[rank] = Note(int(kind), rank, made, final, sent_seconds, int(cause), time.perf_counter())

    def say(self, word: object, ranks: Iterable[int]) -> None:
        """Send a short message of a library to these ranks, without waiting. It need not be read."""
        with self._saying:
            self._said = [request for request in self._said if not request.Test()]
            others = [self._members.index(rank) for rank in ranks if rank != self.rank]
            self._said += [self._comm.isend(word, place, tag=1) for place in others]

    def heard(self) -> list[tuple[int, Any]]:
        """Return the messages received since the last call, each with its sender."""
        from mpi4py import MPI

        words = []
        while (message := self._comm.improbe(MPI.ANY_SOURCE, 1, status := MPI.Status())) is not None:
            words.append((self._members[status.source], message.recv()))
        return words

    def lost(self) -> list[int]:
        """The ranks that are gone, for an MPI that continues after the loss of a process. `look` fails no more for
        them.

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


def as_numbers(text: str) -> tuple[float, ...]:
    """Return a text as numbers, for `Notes.final`."""
    data = zlib.compress(text.encode(errors="replace"))
    return tuple(float(int.from_bytes(data[at : at + _BYTES], "little")) for at in range(0, len(data), _BYTES))


def as_text(numbers: Sequence[float]) -> str:
    """Reverse `as_numbers`."""
    data = b"".join(int(number).to_bytes(_BYTES, "little") for number in numbers)
    return zlib.decompressobj().decompress(data).decode()  # the padding of the last number is after the end
