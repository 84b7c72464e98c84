"""Short notes between ranks beside the collectives: "I failed", "I have finished".

A rank that waits in a collective for a rank that has left would wait for ever, and MPI has no word for it.
So every wait in mpitrain goes through `Control.wait`, which now and then looks for such notes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.launch.activity import BUSY, WAITS, mine
from mpitrain.long_wait import PUBLISH_SECONDS, LongWait
from mpitrain.spans import Spans

if TYPE_CHECKING:
    from mpi4py import MPI

FAILED, FINISHED, GROUP_CALLS = 1, 2, 3

# How often a wait looks at the clock, and for notes. A look costs some microseconds.
_SPINS_BETWEEN_LOOKS = 64
_SECONDS_BETWEEN_LOOKS = 1e-3
# A failed rank ends the whole job at once; should that not reach us, we end by ourselves after this long.
_ABORT_GRACE_SECONDS = 10.0


def until(test: Callable[[], bool], nap: Callable[[], float] = float) -> Iterator[float]:
    """Steps for `Control.wait` that end when `test()` is true; in between one may sleep for `nap()` seconds."""
    while not test():
        yield nap()


@dataclass(frozen=True)
class Note:
    """What a rank tells all others: how many calls it had made, and when (seconds since the epoch, its clock)."""

    kind: int
    rank: int
    calls: int
    sent_seconds: float
    cause: int  # of a failure: equal for equal errors; 0 to 2^52
    seen_seconds: float  # this rank's perf_counter() when the note was read


class Control:
    """The notes of one world. `calls` counts what this rank has begun that all ranks begin: agreements, allreduces."""

    def __init__(
        self, comm: MPI.Comm, disputes: MPI.Comm, hosts: tuple[str, ...], numbers: Sequence[int] | None = None
    ) -> None:
        """`comm` carries the notes, `disputes` the explanations of ranks that disagree; both are for nothing else.

        `numbers`: what the ranks are called in messages, where they are a part of a larger world; default: 0, 1, 2 ...
        """
        self.disputes = disputes
        self.calls = 0
        self._counting = threading.Lock()
        self.notes: dict[int, Note] = {}
        # Of ranks that are about to finish: how many calls they made in a group, by rank and the group's number.
        self.group_calls: dict[tuple[int, int], int] = {}
        self.rank, self.size = int(comm.rank), int(comm.size)  # here also when MPI is gone
        self._comm = comm
        self._hosts = hosts
        self._numbers = range(len(hosts)) if numbers is None else numbers
        self.open_tests: list[Callable[[], object]] = []  # move on what has begun and is not complete
        self.elsewhere: list[Callable[[], object]] = []  # each waits for the calls that a library makes in its threads
        self.posted: BaseException | None = None  # an error of a thread, for the main one to raise
        self.spans: Spans | None = None  # where a trace is kept
        self._wreck: BaseException | None = None
        self._broken_in = ""
        self._in_flight: list[tuple[MPI.Request, numpy.ndarray]] = []

    def name(self, rank: int | None = None) -> str:
        """`rank 3 on node7`; default: this rank."""
        rank = self.rank if rank is None else rank
        return f"rank {self._numbers[rank]} on {self._hosts[rank]}"

    def tell_all(self, kind: int, cause: int = 0, *, last: bool = False) -> Note:
        """Send a note to every other rank. Does not wait: 32 bytes leave at once, whatever the receiver does.

        `last` dates it later than all others.
        """
        sent_seconds = float("inf") if last else time.time()
        note = Note(kind, self.rank, self.calls, sent_seconds, cause, time.perf_counter())
        self._send(kind, note.calls, note.sent_seconds, cause)
        return note

    def tell_group_calls(self, group: int, calls: int) -> None:
        """Send the number of calls that this rank has made in a group, before the note that it has finished.

        `group` is a number that all ranks know it by, 0 to 2^52.
        """
        self._send(GROUP_CALLS, calls, time.time(), group)

    def _send(self, *numbers: float) -> None:
        message = numpy.array(numbers, numpy.float64)
        for rank in range(self.size):
            if rank != self.rank:
                self._in_flight.append((self._comm.Isend(message, rank, tag=0), message))

    def look(self) -> None:
        """Read the notes that have come in."""
        from mpi4py import MPI

        # A matched probe: a thread that fails looks for notes too, and each must be received by the one that found it.
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, 0, status := MPI.Status())) is not None:
            message = numpy.empty(4, numpy.float64)
            found.Recv(message)
            kind, calls, seconds, cause = message
            if kind == GROUP_CALLS:
                self.group_calls[status.source, int(cause)] = int(calls)
                continue
            # A failure after a farewell replaces it; the reverse cannot happen.
            self.notes[status.source] = Note(
                int(kind), status.source, int(calls), float(seconds), int(cause), time.perf_counter()
            )

    def begin_barrier(self) -> MPI.Request:
        """A barrier of its own, beside the world's collectives, which other ranks may still be in."""
        return self._comm.Ibarrier()

    def wait(self, steps: Iterable[float | None], doing: object, peer: int | None = None, *, what: int = WAITS) -> None:
        """Drive `steps` to its end. The text of `doing` names what is waited for, in reports.

        Args:
            steps: does what can be done without waiting at every `next`, and ends when there is nothing to wait for.
                It yields the seconds that one may sleep before the next, or None.
            doing: its str() is only made when it is needed.
            peer: the one rank waited for in a send or receive; otherwise all ranks take part.
            what: WAITS, for other ranks; BUSY, for this rank's own disk, which the others may have to wait for;
                ENDED, for others that have not come to their end. Only WAITS can be reported as a hang.

        Raises:
            MismatchError: another rank has finished without making the call that this one waits in.
            MpitrainError: another rank failed and could not end this process.
        """
        self.check()
        begun = time.perf_counter()
        try:
            self._wait(steps, doing, peer, what)
        except BaseException as error:
            self._leave(doing, error)
            raise
        if self.spans:
            self.spans.add("wait", str(doing), begun, time.perf_counter())

    def _wait(self, steps: Iterable[float | None], doing: object, peer: int | None, what: int) -> None:
        started = looked = 0.0
        long_wait: LongWait | None = None
        try:
            for spins, nap in enumerate(steps, 1):
                if nap:
                    time.sleep(nap)
                else:
                    os.sched_yield()  # lets the other ranks run where there are more ranks than cores
                    if spins % _SPINS_BETWEEN_LOOKS:
                        continue
                now = time.monotonic()
                if not started:
                    started = looked = now
                if now - looked < _SECONDS_BETWEEN_LOOKS:
                    continue
                looked = now
                self.look()
                self._judge(doing, peer)
                if not self._can_wait(self.posted):
                    self.raise_posted()
                for test in tuple(self.open_tests):
                    test()
                if long_wait is not None:
                    long_wait.look(now)
                elif now - started > PUBLISH_SECONDS and (activity := mine()):
                    long_wait = LongWait(activity, self.rank, doing, started, what)
        finally:
            if long_wait is not None:
                long_wait.end()

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """A block that other ranks are to wait for, however long it takes: such a wait is reported, and ends no job."""
        activity = mine()
        entry = activity.begin(BUSY, doing, time.monotonic()) if activity else None
        try:
            yield
        finally:
            if activity and entry:
                activity.end(entry)

    def _can_wait(self, error: BaseException | None) -> bool:
        """Whether the ranks still make the same calls: then the one that the error belongs to will raise it."""
        return isinstance(error, MpitrainError) and error.known_everywhere and not isinstance(error, MismatchError)

    @contextmanager
    def unbroken(self, doing: object) -> Iterator[None]:
        """A block that must not be left in the middle of a communication.

        Where it is, by Ctrl-C or an error of this rank alone, messages are still on their way, and what follows would
        meet them. So the world is broken from then on, and every later block raises.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            self._leave(doing, error)
            raise

    def _leave(self, doing: object, error: BaseException) -> None:
        if not (isinstance(error, MpitrainError) and error.known_everywhere):
            self._broken_in = str(doing)
            self._wreck = error  # its traceback keeps the buffers that MPI still writes into

    def settle(self) -> None:
        """Wait until the calls that the program has left to other libraries' threads are made: they come before."""
        for wait in self.elsewhere:
            wait()

    def raise_posted(self) -> None:
        """Raise what a thread has posted, once."""
        error, self.posted = self.posted, None
        if error is not None:
            raise error

    def free(self) -> None:
        """Give the communicators back to MPI."""
        self._comm.Free()
        self.disputes.Free()

    def count_call(self) -> None:
        """One more call that all ranks make."""
        with self._counting:  # threads make calls too
            self.calls += 1
            if activity := mine():
                activity.count_call(self.calls)

    @property
    def is_broken(self) -> bool:
        """True when a communication was left half done: nothing more can be sent."""
        return self._wreck is not None

    def check(self) -> None:
        """Raise MpitrainError in a broken world."""
        if self._wreck is not None:
            raise MpitrainError(
                f"{self.name()}: {self._broken_in} ended by {self._wreck!r}; this world cannot communicate any more. "
                "Save what this rank has and end the job"
            )

    def _judge(self, doing: object, peer: int | None) -> None:
        """Raise where a note means that the current wait cannot end."""
        for note in tuple(self.notes.values()):  # a thread that fails adds to them
            age = time.perf_counter() - note.seen_seconds
            if note.kind == FAILED and age > _ABORT_GRACE_SECONDS:
                raise MpitrainError(f"{self.name()}: {self.name(note.rank)} failed; stopped in {doing}")
            # What a peer sent before it finished may still be on its way: give it a second.
            left_out = note.calls < self.calls if peer is None else note.rank == peer and age > 1.0
            if note.kind == FINISHED and left_out:
                raise MismatchError(
                    f"{self.name()}: waits in {doing} (its call {self.calls}), but "
                    f"{self.name(note.rank)} has finished (after {note.calls} calls); "
                    "do all ranks run the same number of steps?"
                )
