"""Communication that goes on beside a program's other calls: one piece of work after the other, in the order begun.

All ranks begin the same work in the same order, each when it gets there. It is moved on by whoever waits for it, by
every other wait of the same world, and at the end of the program: so ranks may wait in different places, work that
nobody waits for ends too, and nothing that MPI still writes into can be freed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpitrain.control import Control, until
from mpitrain.errors import MpitrainError
from mpitrain.pieces import Mover

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1

Result = TypeVar("Result")


class Queue:
    """The work on one communicator. Its messages have the same tags, so no two pieces of it may run at one time."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.failed: list[Begun[Any]] = []  # with errors that nobody has been told of
        self._waiting: deque[tuple[Iterator[float | None], object]] = deque()
        self._at_work = threading.Lock()
        self._changing = threading.Lock()

    def __str__(self) -> str:
        """What is being done, for messages."""
        return str(self._waiting[0][1]) if self._waiting else "calls that have ended"

    def begin(self, steps: Iterator[float | None], doing: object) -> None:
        """Queue work, which yields while it has to wait. Does nothing of it yet; str(doing) names it."""
        with self._changing:  # a thread may just have come to the end of what there was
            if not self._waiting:
                self.control.open_tests.append(self.look)
            self._waiting.append((steps, doing))

    def look(self) -> float | None:
        """Do what can be done without waiting; what the work that is left has yielded."""
        # Not free: a thread is here, or this is a wait within the work itself.
        if not self._at_work.acquire(blocking=False):
            return None
        try:
            while self._waiting:
                for nap in self._waiting[0][0]:
                    return nap
                with self._changing:
                    self._waiting.popleft()
                    if not self._waiting:
                        self.control.open_tests.remove(self.look)
            return None
        finally:
            self._at_work.release()

    def finish(self) -> None:
        """Wait until all work has ended; in a broken world there is none.

        Raises:
            MpitrainError: a piece of it has failed, and nobody has been told.
        """
        if not self.control.is_broken:
            self.control.wait(until(self._is_idle), self)
        if self.failed:
            self.failed[0].test()

    def _is_idle(self) -> bool:
        self.look()
        return not self._waiting


class Begun(Generic[Result]):
    """A piece of work in a queue: what handles are.

    Attributes:
        nap: after a `test` that was not the last: seconds that one may sleep before the next.
    """

    def __init__(self, queue: Queue, work: Generator[float | None, None, Result]) -> None:
        self.nap = 0.0
        self._queue = queue
        self._is_done = False
        self._result: Result | None = None
        self._problem: MpitrainError | None = None
        queue.begin(self._run(work), self)

    def test(self) -> bool:
        """Do what can be done without waiting; true once the work is done.

        Raises:
            MpitrainError: it has failed, on every rank.
        """
        if not self._is_done:
            with self._queue.control.unbroken(self._queue):
                self.nap = self._queue.look() or 0.0
        self._raise()
        return self._is_done

    def _drive(self) -> Result:
        """Its result, once it is there. Raises as `test` does."""
        if not self._is_done:
            self._queue.control.wait(self._until_done(), self._queue)
        self._raise()
        return self._result  # type: ignore[return-value]

    def _until_done(self) -> Iterator[float | None]:
        while not self._is_done:
            nap = self._queue.look()
            if not self._is_done:
                yield nap

    def _run(self, work: Generator[float | None, None, Result]) -> Iterator[float | None]:
        try:
            self._result = yield from work
        except MpitrainError as error:
            # On this rank alone it leaves messages on their way: whoever moves it on has to know at once.
            if not error.known_everywhere:
                raise
            self._problem = error
            self._queue.failed.append(self)
        self._is_done = True

    def _raise(self) -> None:
        if self._problem is not None:
            if self in self._queue.failed:
                self._queue.failed.remove(self)
            raise self._problem


class Background(Queue):
    """The calls of mpitrain.collectives. `comm` and `mover`, which works on it, are for them alone."""

    def __init__(self, comm: MPI.Comm, control: Control) -> None:
        super().__init__(control)
        self.comm = comm
        self.mover = Mover(comm, _TAG)
