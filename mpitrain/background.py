"""Communication that goes on beside a program's other calls: one piece of work after the other, in the order begun.

All ranks begin the same work in the same order, each when it gets there. It is moved on by whoever waits for it, by
every other wait of the same world, and at the end of the program: so ranks may wait in different places, and work that
nobody waits for ends too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpitrain.control import Control, until
from mpitrain.pieces import Mover

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1


class Background:
    """The work of one world. `comm` and `mover`, which works on it, are for this work alone."""

    def __init__(self, comm: MPI.Comm, control: Control) -> None:
        self.comm = comm
        self.mover = Mover(comm, _TAG)
        self._control = control
        self._queue: deque[Iterator[float | None]] = deque()
        self._at_work = threading.Lock()

    def begin(self, steps: Iterator[float | None]) -> None:
        """Queue work, which yields while it has to wait. Does nothing of it yet."""
        if not self._queue:
            self._control.open_tests.append(self.look)
        self._queue.append(steps)

    def look(self) -> float | None:
        """Do what can be done without waiting; what the work that is left has yielded."""
        # Not free: a thread is here, or this is a wait within the work itself.
        if not self._at_work.acquire(blocking=False):
            return None
        try:
            while self._queue:
                for nap in self._queue[0]:
                    return nap
                self._queue.popleft()
                if not self._queue:
                    self._control.open_tests.remove(self.look)
            return None
        finally:
            self._at_work.release()

    def finish(self) -> None:
        """Wait until all work has ended; in a broken world there is none."""
        if not self._control.is_broken:
            self._control.wait(until(self._is_idle), "calls that were begun and not waited for")

    def _is_idle(self) -> bool:
        self.look()
        return not self._queue
