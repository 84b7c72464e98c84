"""How ranks end that have not failed: each says so, and waits for the others."""

from __future__ import annotations

import time

from mpitrain.errors import LostRankError
from mpitrain.job.recovery import Recovery
from mpitrain.waiting.notes import FINISHED
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import ENDED
from mpitrain.world import World

# Notes may arrive after MPI's word that a rank is gone.
_LAST_NOTE_SECONDS = 2.0


def farewell(world: World, recovery: Recovery | None = None) -> None:
    """Tell the others that this rank makes no more calls, and wait until they say the same.

    Otherwise a rank that leaves early sits in MPI_Finalize while the others wait for it for ever.

    Raises:
        LostRankError: a rank is gone before all have said so. This comes up with a `recovery` alone; any other MPI
            ends the job.
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
    notes.tell_all(FINISHED)
    if activity := own_activity():
        activity.begin(ENDED, "", time.monotonic())
    request = notes.begin_barrier()
    try:
        # Read all notes: otherwise MPI_Finalize complains of messages that nobody has received. And see that the own
        # ones are read: without MPI_Finalize, what has not left this process when it ends is lost.
        while not request.Test() or len(notes.read) < notes.size - 1 or notes.is_unread():
            notes.look()
            time.sleep(0.001)  # another rank may work on alone for long: wait without using a core
    except MPI.Exception as error:
        if recovery is None or not recovery.is_loss(error):
            raise
        _outlast(world)


def _outlast(world: World) -> None:
    """Wait until all ranks have said that they make no more calls, though some of them may be gone by now.

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
        # A rank ends by itself when all have sent their notes. So if one is missing, those that are gone were killed.
        if is_waiting and (late := [rank for rank, since in gone.items() if now - since > _LAST_NOTE_SECONDS]):
            names = " and ".join(control.name(control.members.index(rank)) for rank in sorted(late))
            how = "was lost behind its training" if len(late) == 1 else "were lost behind their training"
            raise LostRankError(f"{names} {how}, before the end of the script")
        time.sleep(0.001)
