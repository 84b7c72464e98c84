"""In-place recovery: when a rank is lost, the remaining ranks agree on it, and continue in a World without it.

This needs an MPI that survives the loss of a process: Open MPI 5 with ULFM (Bland et al., Post-failure recovery of MPI
communication capability, IJHPCA 27, 2013; MPI calls by name: https://fault-tolerance.org). `mpitrain run --recover`
switches it on.

    a step:      exchange ─> commit ─> update ─> exchange ...
    a loss:      any error ─> revoke ─> refuse the commit ─> shrink ─> make a World, build ─> agree ─> continue
                                                               ^                               │
                                                               └── another rank is lost <──────┘

Revoking ends every communication of the old World with an error, on every rank. So all ranks get here, wherever they
were. `Agree` is the only call that works on a revoked communicator, and it gives every rank the same answer. Each rank
makes it once for each step: in `commit`, or, if the rank was elsewhere when it learned of the loss, with a no. So
either all remaining ranks count a step, or none does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.cuda.failures import lost_gpu
from mpitrain.errors import LaunchError, LostRankError
from mpitrain.job.failure import end_as_lost
from mpitrain.job.worlds import make_world
from mpitrain.waiting.control import patient_naps
from mpitrain.watching.activity import own_activity, waiting
from mpitrain.watching.ranges import rank_ranges
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

# An error may occur before MPI detects the loss that caused it: the memory of a process is gone at once.
_NEWS_SECONDS = 1.0


@dataclass(frozen=True)
class LostRanks:
    """The ranks that were lost, and the time until the others continued.

    Attributes:
        text: as in "rank 2 on lab1 was lost".
        ranks: by their numbers in the job.
        seconds: the time on this rank from its detection of the loss until all remaining ranks were ready to continue.
    """

    text: str
    ranks: tuple[int, ...]
    seconds: float


class Recovery:
    """Moves a job from one World to the next. Every rank has one, and all ranks make the same calls.

    Attributes:
        world: the current World.
        lost: the ranks that were lost so far, by their numbers in the job.
    """

    def __init__(self, world: World, base: MPI.Comm) -> None:
        """Not collective.

        Args:
            world: all ranks of the job.
            base: the communicator from which `world` was made. It is used for nothing else.

        Raises:
            LaunchError: this MPI cannot continue after the loss of a rank.
        """
        self.world = world.replaced(committer=self.commit, leaver=self.end_if_lost)
        self.lost: tuple[int, ...] = ()
        self._base = base
        self._has_agreed = False  # on the step in which the loss came up
        self._kept: list[Any] = []
        try:
            self._failed()
        except (NotImplementedError, _mpi().Exception) as error:
            raise LaunchError(
                f"{world.name()}: --recover needs an MPI that continues after the loss of a rank, and "
                f"{_mpi().Get_library_version().splitlines()[0]} does not ({error}). Use Open MPI 5, or leave out "
                "--recover: then the job starts again from memory"
            ) from None

    def commit(self) -> None:
        """See World.commit."""
        answer = numpy.ones(1, numpy.int32)
        try:
            _complete(self._base.Iagree(answer), "commit a step")
        except _mpi().Exception as error:
            self._has_agreed = True
            raise LostRankError(self._lost_text()) from error
        if not answer[0]:
            self._has_agreed = True
            raise LostRankError(self._lost_text())

    def end_if_lost(self, error: BaseException) -> None:
        """End this process as a lost rank if `error` means that its GPU is lost, and other ranks can continue."""
        if self.world.size > 1 and (lost := lost_gpu(error, self.world)):
            end_as_lost(self.world, error, lost)

    def is_loss(self, error: BaseException) -> bool:
        """Whether a lost rank is the cause of `error`. May wait a second until MPI reports a loss.

        The error may be of any kind: a partial message of a dying rank is misread.
        """
        if isinstance(error, LostRankError):
            return True
        if getattr(error, "known_everywhere", False):
            return False
        mpi = _mpi()
        if isinstance(error, mpi.Exception) and error.Get_error_class() in (
            mpi.ERR_PROC_FAILED,
            mpi.ERR_PROC_FAILED_PENDING,
            mpi.ERR_REVOKED,
        ):
            return True
        deadline = time.monotonic() + _NEWS_SECONDS
        while time.monotonic() < deadline:
            # MPI detects a loss only in a call that communicates.
            with suppress(mpi.Exception):
                self.world.control.notes.look()
            if self._base.Is_revoked() or any(comm.Is_revoked() for comm in self._comms()) or self._failed():
                return True
            time.sleep(0.001)
        return False

    def recover(self, go_on: Callable[[World], None], keep: Any = None) -> LostRanks:
        """Make a World of the remaining ranks, and call `go_on` in it on each of them. Return what was lost.

        Every remaining rank calls this, after `abandon`. If another rank is lost in the meantime, `go_on` is called
        again with another World.

        Args:
            go_on: makes what the rank needs in the new World. Collective.
            keep: objects with memory that MPI may still write into. They are kept until the process ends.

        Raises:
            Exception: what `go_on` raises, unless a lost rank is the cause. Raised on this rank alone.
        """
        began, old = time.perf_counter(), self.world
        self._kept += [keep, old]
        if not self._has_agreed:
            self._agree(False)  # on the step that others may be about to commit
        while True:
            self._shrink(old)
            is_ready = False
            try:
                self.world = self._next_world(old)
                go_on(self.world)
                is_ready = True
            except Exception as error:
                if not self.is_loss(error):
                    raise
                self.abandon()
            if self._agree(is_ready):
                break
            self.abandon()
        self._has_agreed = False
        ended = time.perf_counter()
        loss = self._loss(old, ended - began)
        if spans := self.world.control.spans:
            spans.add("wait", f"continue: {loss.text}", began, ended)
        if self.world.is_root:
            left = rank_ranges(self.world.control.members)
            ranks = f"rank{'s' * (self.world.size > 1)} {left}"
            os.write(2, f"mpitrain: {loss.text}; {ranks} continued after {loss.seconds:.2f} s\n".encode())
        return loss

    def finish(self) -> None:
        """End MPI, if it can be ended: after the loss of a rank MPI_Finalize of Open MPI may wait for ever (#11404)."""
        if not self.lost and not self._failed():
            _mpi().Finalize()

    def abandon(self) -> None:
        """End all communication of the current World, on every rank. Call it as soon as `is_loss` is true."""
        self.world.control.leave("a call", LostRankError(self._lost_text()))
        for comm in self._comms():
            if not comm.Is_revoked():
                comm.Revoke()

    def _comms(self) -> list[MPI.Comm]:
        return [*self.world.control.comms, self._base]

    def _agree(self, is_ready: bool) -> bool:
        """Whether all ranks say yes, and none has been lost. The same on every rank."""
        answer = numpy.array([is_ready], numpy.int32)
        try:
            _complete(self._base.Iagree(answer), "agree on a lost rank")
        except _mpi().Exception:
            return False
        return bool(answer[0])

    def _shrink(self, old: World) -> None:
        """Make the next communicator, of the remaining ranks."""
        with waiting("find the remaining ranks"):
            self._base = self._base.Shrink()
        left = self._members()
        self.lost = tuple(sorted({*self.lost, *old.control.members} - {*left}))
        if activity := own_activity():
            activity.lose(self.lost)

    def _members(self) -> Sequence[int]:
        """The numbers in the job of the ranks of the newest communicator."""
        return numbers_in_job(self._base.Get_group())

    def _next_world(self, old: World) -> World:
        with waiting("make the next World"):
            made = make_world(self._base, old.config, old.generation + 1, members=self._members())
        made.control.spans = old.control.spans
        devices = made.context.devices  # of the ranks that the job began with
        context = replace(made.context, devices=tuple(devices[rank] for rank in self._members()) if devices else ())
        return made.replaced(
            context=context,
            profile=old.profile,
            make_arrays=old.make_arrays,
            committer=self.commit,
            leaver=self.end_if_lost,
        )

    def _failed(self) -> list[int]:
        """The ranks that MPI knows to be lost, by their numbers in the job."""
        return numbers_in_job(self._base.Get_failed())

    def _lost_text(self) -> str:
        control = self.world.control
        names = [control.name(control.members.index(rank)) for rank in self._failed() if rank in control.members]
        return (
            f"{control.name()}: {' and '.join(names) or 'a rank'} has been lost; Trainer.run and a loop in mt.elastic "
            "continue without it, other code does not"
        )

    def _loss(self, old: World, seconds: float) -> LostRanks:
        members = old.control.members
        places = [place for place, rank in enumerate(members) if rank in self.lost]
        names = " and ".join(old.name(place) for place in places)
        text = f"{names} {'was' if len(places) == 1 else 'were'} lost"
        return LostRanks(text, tuple(members[place] for place in places), seconds)


def numbers_in_job(group: MPI.Group) -> list[int]:
    """The numbers in the job of a group's ranks. The group is freed."""
    everyone = _mpi().COMM_WORLD.Get_group()
    try:
        here = list(range(group.size))
        return [int(rank) for rank in group.Translate_ranks(here, everyone)] if here else []
    finally:
        everyone.Free()
        group.Free()


def _complete(request: MPI.Request, doing: str) -> None:
    """Wait for an agreement. This wait must not be interrupted: a rank must not leave before it knows the answer."""
    naps = patient_naps()
    while not request.Test():
        nap = naps()
        if not nap:
            os.sched_yield()
            continue
        with waiting(doing):
            while not request.Test():
                time.sleep(naps())
        return


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
