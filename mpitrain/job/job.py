"""The Job of this process, from init() to the end of the process, whichever World is current."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from mpitrain.cuda.loss import lost_gpu
from mpitrain.job.failure import end_job
from mpitrain.job.partings import farewell
from mpitrain.job.recovery import LostRanks, Recovery
from mpitrain.job.role import Role
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import PARTED
from mpitrain.world import World


class Job:
    """A process has one Job, which mpitrain.job.start keeps. An uncaught exception in any thread ends the whole job.

    Attributes:
        world: the current World, which init() returns. An object that outlives a World reads it here.
        num_runs: how many runs of Trainers, and loops with mt.keep, have begun.
        is_elastic: mpitrain.elastic goes on where a rank is lost.
        recovery: takes the job to its next World where a rank is lost. None: the loss of a rank ends the job.
        role: what this process does in a job with servers.
        has_served: the servers and workers of `everyone` have met, which they do once.
        everyone: with `mpitrain run --servers` or `mpitrain plan`, the World of all ranks; `world` then has only this
            rank. Else None.
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
        atexit.register(self._at_exit)

    def end(self, error: BaseException) -> NoReturn:
        """Report `error` and end every process of the job with a non-zero code. Never returns.

        A rank whose GPU is lost ends alone, if the others go on without a lost rank.
        """
        if self.recovery is not None:
            self.recovery.end_if_lost(error)
        if lost := lost_gpu(error, self.world):
            error.add_note(
                f"mpitrain: {self.world.control.name()}: {lost}. A restart would use the same GPU: run `mpitrain "
                f"doctor` on {self.world.host}, and leave the GPU out of --hosts until it is repaired"
            )
        end_job(self.world, error, self._ending)

    def _uncaught(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        error = (error or kind()).with_traceback(trace)
        if os.getpid() != self._process:  # a forked child is no rank, and must not use MPI
            sys.__excepthook__(kind, error, trace)
            return
        self.end(error)

    def _uncaught_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            self._uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def recover(self, go_on: Callable[[World], None], keep: object = None) -> LostRanks:
        """Go on in a World without the lost ranks. See Recovery.recover."""
        assert self.recovery is not None

        def enter(world: World) -> None:
            self.world = world
            go_on(world)

        return self.recovery.recover(enter, keep)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            farewell(self.world, self.recovery)
            if self.recovery is not None:
                self.recovery.finish()
            if activity := own_activity():
                activity.enter(PARTED)
        except (KeyboardInterrupt, Exception) as error:
            self.end(error)
