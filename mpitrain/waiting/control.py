"""Every wait in mpitrain goes through `Control.wait`: it drives the work, looks for notes, and publishes the wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.waiting.long_wait import PUBLISH_SECONDS, LongWait
from mpitrain.waiting.notes import FAILED, FINISHED, Notes
from mpitrain.watching.activity import Spans, num_moved, own_activity
from mpitrain.watching.rank_record import BUSY, WAITS

if TYPE_CHECKING:
    from mpi4py import MPI

# The interval at which a wait looks at the clock and for notes. A look costs some microseconds.
_SPINS_BETWEEN_LOOKS = 64
_SECONDS_BETWEEN_LOOKS = 1e-3
# A failed rank ends the whole job at once. If that does not reach this rank, the rank ends by itself after this time.
_ABORT_GRACE_SECONDS = 10.0

_is_child = False  # this process was forked from one that had loaded this module; cheaper than os.getpid() in each call


def _note_fork() -> None:
    global _is_child  # noqa: PLW0603 - a process is forked as a whole
    _is_child = True


os.register_at_fork(after_in_child=_note_fork)
# For this long, a wait that moves no data polls without sleeping: other ranks that have got as far need some 20 us.
# Then it sleeps for a share of the time that it has lasted, so that it ends at most that share later.
_PATIENT_AFTER_SECONDS, _PATIENT_SHARE, _LONGEST_PATIENT_NAP = 10e-3, 1 / 64, 500e-6


def until(test: Callable[[], bool], nap: Callable[[], float] = float) -> Iterator[float]:
    """Steps for `Control.wait` that end when `test()` is true. Between two tests the wait may sleep `nap()` seconds."""
    while not test():
        yield nap()


def patient_naps(longest_seconds: float = _LONGEST_PATIENT_NAP) -> Callable[[], float]:
    """Return a function for a wait that moves no data and begins now: the seconds to sleep before the next look."""
    begun = time.perf_counter()

    def nap() -> float:
        lasted = time.perf_counter() - begun
        return 0.0 if lasted < _PATIENT_AFTER_SECONDS else min(lasted * _PATIENT_SHARE, longest_seconds)

    return nap


class Control:
    """Makes the waits of one World, and counts the calls that all its ranks begin: agreements, allreduces.

    Attributes:
        notes: the notes of the whole job.
        members: the numbers of this World's ranks in the whole job. Messages name ranks by these numbers.
    """

    def __init__(
        self,
        notes: Notes,
        disputes: MPI.Comm,
        hosts: tuple[str, ...],
        members: Sequence[int],
        number: int = 0,
        parent: Control | None = None,
    ) -> None:
        """
        Args:
            disputes: carries only the explanations of ranks that disagree.
            hosts: the hosts of the ranks of this World.
            number: the number of the World. It is the same on all its ranks, and no other World of the job has it.
            parent: the Control of the World that this World is a part of.
        """
        self.notes = notes
        self.disputes = disputes
        self.members = tuple(members)
        self.rank, self.size = int(disputes.rank), int(disputes.size)  # kept here for when MPI has ended
        self._place_of = {member: place for place, member in enumerate(self.members)}
        self._number = number
        self._made = notes.made
        self._made[number] = 0
        self._counting = threading.Lock()
        self._hosts = hosts
        self.open_tests: list[Callable[[], object]] = []  # drive what has begun and is not complete
        self.agreements: list[object] = []  # the agreements among them, in the order begun
        # Everything of this World, and of Worlds that are part of it, that can be revoked.
        self.comms: list[MPI.Comm] = parent.comms if parent else []
        # Each waits for the calls that a library makes in its threads.
        self.elsewhere: list[Callable[[], object]] = parent.elsewhere if parent else []
        # Each waits for work that this rank has begun for the others, before it reports that it makes no more calls.
        self.last_waits: list[Callable[[], object]] = parent.last_waits if parent else []
        self.same_call: tuple[int, str] | None = None  # stands for the place of each call; see World.same_call
        self.posted: BaseException | None = None  # an error of a thread, for the main one to raise
        self.spans: Spans | None = parent.spans if parent else None  # where a trace is kept
        self._wreck: BaseException | None = None
        self._broken_in = ""
        self._process = os.getpid()

    def name(self, rank: int | None = None) -> str:
        """The name of a rank in messages, such as `rank 3 on node7`. Default: this rank."""
        rank = self.rank if rank is None else rank
        return f"rank {self.members[rank]} on {self._hosts[rank]}"

    @property
    def number(self) -> int:
        """The number of the World, the same on all its ranks."""
        return self._number

    @property
    def calls(self) -> int:
        """The number of calls that this rank has begun in this World."""
        return self._made[self._number]

    def wait(
        self,
        steps: Iterable[float | None],
        doing: object,
        peers: Collection[int] | None = None,
        *,
        call: int | None = None,
        status: int = WAITS,
    ) -> None:
        """Drive `steps` to its end. In reports, the text of `doing` names the wait.

        Args:
            steps: each `next` makes progress without waiting; it ends when there is nothing left to wait for.
                It yields the seconds that the wait may sleep before the next `next`, or None.
            doing: its str() is made only when it is needed.
            peers: the ranks that a send or receive waits for, none if any rank will do. Default: all ranks.
            call: the number of the call that the wait belongs to. Default: the last call.
            status: WAITS: for other ranks. BUSY: for this rank's own disk, for which the other ranks may have to wait.
                ENDED: for ranks that have not come to their end. Only WAITS can be reported as a hang.

        Raises:
            MismatchError: another rank has finished without making the call that this one waits in.
            MpitrainError: another rank failed and could not end this process.
        """
        self.check()
        begun, started, looked, moved = time.perf_counter(), 0.0, 0.0, 0
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
                    started, looked, moved = now, now, num_moved()
                if now - looked < _SECONDS_BETWEEN_LOOKS:
                    continue
                looked = now
                self.notes.look()
                self.judge(doing, peers, call)
                if not self._can_wait(self.posted):
                    self.raise_posted()
                for test in tuple(self.open_tests):
                    test()
                if long_wait is not None:
                    long_wait.look(now)
                elif now - started > PUBLISH_SECONDS and (activity := own_activity()):
                    # If the steps themselves take long, looks are far apart: data may have moved since the last one.
                    since = started if moved == activity.moved else now
                    long_wait = LongWait(activity, self.job_rank, doing, since, status)
        except BaseException as error:
            self.leave(doing, error)
            raise
        finally:
            if long_wait is not None:
                long_wait.end()
            if started and status == WAITS and (activity := own_activity()):
                activity.add_waited(time.perf_counter() - begun)
        if self.spans:
            self.spans.add("wait", str(doing), begun, time.perf_counter())

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Run a block for which other ranks wait, however long it takes. Such a wait is reported, but ends no job."""
        activity = own_activity()
        entry = activity.begin(BUSY, doing, time.monotonic()) if activity else None
        try:
            yield
        finally:
            if activity and entry:
                activity.end(entry)

    def _can_wait(self, error: BaseException | None) -> bool:
        """True if the ranks still make the same calls. If so, the call to which the error belongs will raise it."""
        return isinstance(error, MpitrainError) and error.known_everywhere and not isinstance(error, MismatchError)

    @contextmanager
    def unbroken(self, doing: object) -> Iterator[None]:
        """Run a block that must not be left in the middle of a communication.

        If Ctrl-C or an error of this rank alone ends the block, messages are still under way, and a later call would
        receive them. So the World is broken from then on, and every later block raises.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            self.leave(doing, error)
            raise

    def leave(self, doing: object, error: BaseException) -> None:
        """Note that an error has ended a communication. The World is broken, unless all ranks raise the same error."""
        if not (isinstance(error, MpitrainError) and error.known_everywhere):
            self._broken_in = str(doing)
            self._wreck = error  # its traceback keeps the buffers that MPI still writes into

    def give_back(self, comm: MPI.Comm) -> None:
        """Free a communicator of this World. Collective."""
        self.comms.remove(comm)
        comm.Free()

    def settle(self) -> None:
        """Wait until the calls that the program delegated to threads of other libraries are made. They come first."""
        for wait in self.elsewhere:
            wait()

    def raise_posted(self) -> None:
        """Raise an error that a thread has posted, once."""
        error, self.posted = self.posted, None
        if error is not None:
            raise error

    def count_call(self) -> None:
        """Count one more call that all ranks make."""
        with self._counting:  # threads make calls too
            self._made[self._number] = calls = self._made[self._number] + 1
            if activity := own_activity():
                activity.count_call(calls)

    @property
    def job_rank(self) -> int:
        """The number of this rank in the whole job."""
        return self.members[self.rank]

    @property
    def is_broken(self) -> bool:
        """True if a communication was left half done. Then nothing more can be sent."""
        return self._wreck is not None

    def check(self) -> None:
        """Raise MpitrainError in a broken world, and in a process that the rank has forked."""
        if _is_child and os.getpid() != self._process:
            raise MpitrainError(
                f"{self.name()}: process {os.getpid()} was forked from the rank's own ({self._process}), and cannot "
                "communicate: return the data to the rank, and send it there"
            )
        if self._wreck is not None:
            raise MpitrainError(
                f"{self.name()}: {self._broken_in} ended by {self._wreck!r}; this World can no longer "
                "communicate. Save this rank's data and end the job"
            )

    def judge(self, doing: object, peers: Collection[int] | None = None, call: int | None = None) -> None:
        """Raise if a note means that `doing` cannot end. Arguments and errors are those of `wait`."""
        for note in tuple(self.notes.read.values()):  # a thread that fails adds to them
            rank = self._place_of.get(note.rank)
            if rank is None:
                continue
            age = time.perf_counter() - note.seen_seconds
            if note.kind == FAILED and age > _ABORT_GRACE_SECONDS:
                raise MpitrainError(f"{self.name()}: {self.name(rank)} failed; stopped in {doing}")
            made, needed = note.made.get(self._number, 0), self.calls if call is None else call
            # A message that a peer sent before it finished may still be in flight: wait a second for it.
            left_out = made < needed if peers is None else rank in peers and age > 1.0
            if note.kind == FINISHED and left_out:
                how = f"left with exit code {note.cause}" if note.cause else "has finished"
                error = MismatchError(
                    f"{self.name()}: waits in {doing} (its call {needed}), but "
                    f"{self.name(rank)} {how} (after {made} calls); "
                    "do all ranks run the same number of steps?"
                )
                error.is_repeated = bool(note.cause)  # the other rank reports why it left
                raise error
