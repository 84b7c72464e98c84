"""The Job of this process, from init() to the end of the process, over all its Worlds; and how the process ends.

A rank that has not failed reports its end, and waits for the others. SIGTERM to a rank of a job with snapshot agents
means that its host is about to be shut down, so the rank requests that the host leaves.

    SIGTERM ─> the rank's record ─> agent ─> launcher: is the job healthy? ─┬─> the host leaves: wait for that
                                                                            └─> end, as without `heed`

mpiexec sends SIGTERM too, when it ends the other ranks after a failure. So the rank waits for its snapshot agent's
answer, and ends by the signal if that is no, or if none comes.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from mpitrain.context import JobContext
from mpitrain.cuda.failures import lost_gpu
from mpitrain.early import before_threads_end, exit_code_of, last_exit, uncaught
from mpitrain.errors import LostRankError
from mpitrain.job.failure import end_job, remark_on_part
from mpitrain.job.recovery import LostRanks, Recovery
from mpitrain.launch.kept import DIES, STAYS, KeeperLine
from mpitrain.reducer.checks import check_final
from mpitrain.reducer.unexchanged import tell_of_buffers, tell_of_unexchanged
from mpitrain.role import Role
from mpitrain.waiting.notes import FAILED, FINISHED
from mpitrain.watching.activity import Activity, own_activity
from mpitrain.watching.rank_record import ENDED, PARTED
from mpitrain.world.world import World

# Notes may arrive after MPI has reported that a rank is gone.
_LAST_NOTE_SECONDS = 2.0


def farewell(world: World, recovery: Recovery | None = None, left: SystemExit | None = None) -> None:
    """Tell the others that this rank makes no more calls, and wait until they report the same.

    Otherwise a rank that leaves early would be in MPI_Finalize while the others wait for it for ever.

    Args:
        left: the SystemExit by which this rank leaves, if its code is not 0.

    Raises:
        SystemExit: `left`, because another rank cannot continue without this one.
        LostRankError: a rank is gone before all have reported. Only possible with a `recovery`; otherwise MPI ends the
            job.
        MismatchError: the optimizers of the ranks have made different steps. Raised on every rank.
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    world.control.settle()
    for wait in tuple(world.control.last_waits):
        wait()
    part: World | None = world
    while part is not None:
        for queue in (part.background, part.queue):
            queue.finish()
        part = part.parent
    notes = world.control.notes
    own = notes.tell_all(FINISHED, exit_code_of(left) if left else 0)
    if activity := own_activity():
        activity.begin(ENDED, "", time.monotonic())
    request = notes.begin_barrier()
    try:
        # Read all notes: otherwise MPI_Finalize complains about messages that were not received. Also wait until this
        # rank's notes are read: without MPI_Finalize, anything unsent when the process ends is lost.
        while not request.Test() or len(notes.read) < notes.size - 1 or notes.is_unread():
            notes.look()
            if left and any(note.kind == FAILED and note.is_last for note in notes.read.values()):
                raise left
            time.sleep(0.001)  # another rank may keep working for long: wait without using a core
    except MPI.Exception as error:
        if recovery is None or not recovery.is_loss(error):
            raise
        _outlast(world)
    final = {rank: note.final for rank, note in sorted({**notes.read, own.rank: own}.items())}
    if own.cause == 0 and not any(note.cause for note in notes.read.values()):
        check_final(world, final)  # a rank that left with a code has reported fewer steps
    tell_of_unexchanged(world, final)
    tell_of_buffers(world, final)


def _outlast(world: World) -> None:
    """Wait until all ranks have reported that they make no more calls, though some of them may be gone by now.

    After a loss ranks end without MPI_Finalize (Recovery.finish). To MPI, such a rank is lost as soon as it has ended,
    which may be before the others have heard of the barrier's end.
    """
    from mpi4py import MPI

    notes, control = world.control.notes, world.control
    gone: dict[int, float] = {}  # and since when
    while (is_waiting := len(notes.read) < notes.size - 1) or notes.is_unread(gone):
        lost = notes.lost()
        try:
            notes.look()
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_REVOKED:  # another rank recovers, in which this one can take no part
                raise
        now = time.monotonic()
        gone = {rank: gone.get(rank, now) for rank in lost}
        # A rank ends by itself only when all have sent their notes. So if a note is missing, ranks that are gone were
        # killed.
        if is_waiting and (late := [rank for rank, since in gone.items() if now - since > _LAST_NOTE_SECONDS]):
            names = " and ".join(control.name(control.members.index(rank)) for rank in sorted(late))
            how = "was lost after its training" if len(late) == 1 else "were lost after their training"
            raise LostRankError(f"{names} {how}, before the end of the script")
        time.sleep(0.001)


_LOOK_SECONDS = 0.05
# The record takes a second to reach the launcher, and the answer another one. A busy machine may delay both.
_ANSWER_SECONDS = 10.0


def heed(activity: Activity, context: JobContext) -> None:
    """From now on, take SIGTERM to this process as a request that its host leaves. `context` is that of this rank.

    A program that handles SIGTERM itself, before or after this call, keeps its handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    process, is_told = os.getpid(), False

    def told(*_: object) -> None:
        nonlocal is_told
        if os.getpid() != process:  # a helper that was forked
            _end()
        elif not is_told:
            is_told = True
            activity.tell_end()
            _thread.start_new_thread(_wait, (context,))  # of threading, this thread may hold a lock

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is told:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, told)
    os.register_at_fork(after_in_child=forget)


def _wait(context: JobContext) -> None:
    """Wait until the job has left this host, or until it is certain that it will not."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    with suppress(OSError, ValueError, KeyError):
        line = KeeperLine(context.keeper, context.job)
        while True:
            wish = line.wish()
            if wish == DIES or (wish == STAYS and time.monotonic() > deadline):
                break
            if wish != STAYS:  # perhaps because of another change, which may be dropped; then this one follows
                deadline = time.monotonic() + _ANSWER_SECONDS
            time.sleep(_LOOK_SECONDS)
    _end()


def _end() -> None:
    """End by SIGTERM. Python sets no handler outside the main thread, which may compute."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


class Job:
    """A process has one Job, which mpitrain.job.start keeps. An uncaught exception in any thread ends the whole job.

    Attributes:
        world: the current World, which init() returns. An object that outlives a World reads it here.
        num_runs: how many runs of Trainers, and loops with mt.keep, have begun.
        is_elastic: mpitrain.elastic continues where a rank is lost.
        recovery: moves the job to its next World when a rank is lost. None: the loss of a rank ends the job.
        role: the role of this process in a job with servers.
        has_served: the servers and workers of `everyone` have connected, which they do once.
        everyone: with `mpitrain run --servers` or `mpitrain plan`, the World of all ranks; `world` then has only this
            rank. Otherwise None.
    """

    def __init__(self, world: World) -> None:
        """`world` has all ranks of the job. Collective."""
        self.world = world
        self.num_runs = 0
        self.recovery: Recovery | None = None
        self.is_elastic = False
        self.role = Role()
        self.has_served = False
        self.everyone: World | None = None
        self._process = os.getpid()
        self._ending = threading.Lock()
        if world.size == 1:
            return  # Python's own behaviour is right for one process
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        before_threads_end(self._look_for_uncaught)
        atexit.register(self._at_exit)

    def end(self, error: BaseException) -> NoReturn:
        """Report `error` and end every process of the job with a non-zero code. Never returns.

        A rank whose GPU is lost ends alone, if the others continue without a lost rank.
        """
        with suppress(Exception):  # a class of the program's may have failing attributes
            if self.recovery is not None:
                self.recovery.end_if_lost(error)
            if lost := lost_gpu(error, self.world):
                error.add_note(
                    f"mpitrain: {self.world.control.name()}: {lost}. A restart would use the same GPU: run `mpitrain "
                    f"doctor` on {self.world.host}, and leave the GPU out of --hosts until it is repaired"
                )
            if remark := remark_on_part(error, self.world):
                error.add_note(f"mpitrain: {remark}")
        end_job(self.world, error, self._ending)

    def _uncaught(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        error = (error or kind()).with_traceback(trace)
        if os.getpid() != self._process:  # a forked child is not a rank, and must not use MPI
            sys.__excepthook__(kind, error, trace)
            return
        self.end(error)

    def _uncaught_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            self._uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _look_for_uncaught(self) -> None:
        """End the job if a sys.excepthook other than mpitrain's has handled the exception that ended the program."""
        if os.getpid() == self._process and (error := uncaught()):
            self.end(error)

    def recover(self, go_on: Callable[[World], None], keep: object = None) -> LostRanks:
        """Continue in a World without the lost ranks. See Recovery.recover."""
        assert self.recovery is not None

        def enter(world: World) -> None:
            self.world = world
            go_on(world)

        return self.recovery.recover(enter, keep)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            farewell(self.world, self.recovery, last_exit())
            if self.recovery is not None:
                self.recovery.finish()
            if activity := own_activity():
                activity.enter(PARTED)
        except (KeyboardInterrupt, SystemExit, Exception) as error:
            self.end(error)
