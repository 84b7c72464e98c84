"""Communication in the background of a program's other calls: one piece of work after the other, in the order begun.

All ranks begin the same work in the same order, each at its own time. Three things drive the work: a wait for the work
itself, every other wait of the same World, and the end of the program. So ranks may wait in different places, work that
no call waits for also ends, and memory that MPI still writes into is never freed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpitrain.errors import MpitrainError
from mpitrain.waiting.control import Control, until
from mpitrain.waiting.pieces import Mover

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1

Result = TypeVar("Result")


class Begun(Generic[Result]):
    """A piece of work in a queue. Handles are made of it.

    Attributes:
        steps: a generator. Each `next` does what can be done without waiting. It yields while it has to wait (None:
            look again at once; a number: the seconds that the wait may sleep), and returns the result.
        is_done: the work has ended, with `result` or with `problem`.
    """

    def __init__(self, queue: Queue, steps: Iterator[float | None], doing: object = "") -> None:
        """Queue the work, and do none of it yet. str(doing) names the work, unless a subclass does."""
        self.steps = steps
        self.is_done = False
        self.result: Result | None = None
        self.problem: MpitrainError | None = None
        self._queue = queue
        self._doing = doing
        queue.add(self)

    def __str__(self) -> str:
        """The name of the work, for messages."""
        return str(self._doing)

    def test(self) -> bool:
        """Make progress without waiting. True once the work is done.

        Raises:
            MpitrainError: the work has failed, on every rank.
        """
        if not self.is_done:
            self._queue.control.check()
            self._queue.look()
        self._raise()
        return self.is_done

    def _drive(self) -> Result:
        """Wait for the work, and return its result. Raises as `test` does."""
        if not self.is_done:
            self._queue.control.wait(self._until_done(), self._queue)
        self._raise()
        return self.result  # type: ignore[return-value]

    def _until_done(self) -> Iterator[float | None]:
        while not self.is_done:
            nap = self._queue.look()
            if not self.is_done:
                yield nap

    def _raise(self) -> None:
        if self.problem is not None:
            if self in self._queue.failed:
                self._queue.failed.remove(self)
            raise self.problem


class Queue:
    """The work on one communicator. All messages have the same tags, so only one piece of work may run at a time."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.failed: list[Begun[Any]] = []  # with errors that have not been reported
        self._waiting: deque[Begun[Any]] = deque()
        self._at_work = threading.Lock()
        self._changing = threading.Lock()

    def __str__(self) -> str:
        """The name of the work at the front, for messages."""
        return str(self._waiting[0]) if self._waiting else "calls that have ended"

    def add(self, begun: Begun[Any]) -> None:
        """Put work at the end of the queue."""
        with self._changing:  # a thread may just have come to the end of what there was
            if not self._waiting:
                self.control.open_tests.append(self.look)
            self._waiting.append(begun)

    def look(self) -> float | None:
        """Make progress without waiting. Return what the work at the front has yielded.

        An error of this rank alone leaves messages under way, and breaks the World.
        """
        # If the lock is taken, a thread is here, or this is a wait within the work itself.
        if not self._at_work.acquire(blocking=False):
            return None
        try:
            while self._waiting:
                begun = self._waiting[0]
                try:
                    return next(begun.steps)
                except StopIteration as end:
                    begun.result = end.value
                except MpitrainError as error:
                    if not error.known_everywhere:
                        raise
                    begun.problem = error
                    self.failed.append(begun)
                begun.is_done = True
                with self._changing:
                    self._waiting.popleft()
                    if not self._waiting:
                        self.control.open_tests.remove(self.look)
            return None
        except BaseException as error:
            self.control.leave(self, error)
            raise
        finally:
            self._at_work.release()

    def finish(self) -> None:
        """Wait until all work has ended. A broken World has no work.

        Raises:
            MpitrainError: a piece of work has failed, and no call has raised the error yet.
        """
        if not self.control.is_broken:
            self.control.wait(until(self._is_idle), self)
        if self.failed:
            self.failed[0].test()

    def _is_idle(self) -> bool:
        self.look()
        return not self._waiting


class Background(Queue):
    """The calls of mpitrain.collectives. Only they use `comm`, and the `mover` on it."""

    def __init__(self, comm: MPI.Comm, control: Control) -> None:
        super().__init__(control)
        self.comm = comm
        self.mover = Mover(comm, _TAG)
