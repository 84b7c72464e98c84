"""Communication that goes on beside a program's other calls: one piece of work after the other, in the order begun.

All ranks begin the same work in the same order, each when it gets there. It is moved on by whoever waits for it, by
every other wait of the same world, and at the end of the program: so ranks may wait in different places, work that
nobody waits for ends too, and nothing that MPI still writes into can be freed.
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
    """A piece of work in a queue: what handles are.

    Attributes:
        steps: do what can be done without waiting at each `next`, yield while they have to wait (None: look again at
            once; a number: so many seconds one may sleep), and end, a generator with its result.
        is_done: it has ended, with `result` or with `problem`.
    """

    def __init__(self, queue: Queue, steps: Iterator[float | None], doing: object = "") -> None:
        """Queues the work. None of it is done yet. str(doing) names it, where a subclass does not."""
        self.steps = steps
        self.is_done = False
        self.result: Result | None = None
        self.problem: MpitrainError | None = None
        self._queue = queue
        self._doing = doing
        queue.add(self)

    def __str__(self) -> str:
        """What is being done, for messages."""
        return str(self._doing)

    def test(self) -> bool:
        """Do what can be done without waiting; true once the work is done.

        Raises:
            MpitrainError: it has failed, on every rank.
        """
        if not self.is_done:
            self._queue.control.check()
            self._queue.look()
        self._raise()
        return self.is_done

    def _drive(self) -> Result:
        """Its result, once it is there. Raises as `test` does."""
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
    """The work on one communicator. Its messages have the same tags, so no two pieces of it may run at one time."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.failed: list[Begun[Any]] = []  # with errors that nobody has been told of
        self._waiting: deque[Begun[Any]] = deque()
        self._at_work = threading.Lock()
        self._changing = threading.Lock()

    def __str__(self) -> str:
        """What is being done, for messages."""
        return str(self._waiting[0]) if self._waiting else "calls that have ended"

    def add(self, begun: Begun[Any]) -> None:
        """Put work behind all that is there."""
        with self._changing:  # a thread may just have come to the end of what there was
            if not self._waiting:
                self.control.open_tests.append(self.look)
            self._waiting.append(begun)

    def look(self) -> float | None:
        """Do what can be done without waiting; what the work that is left has yielded.

        An error that only this rank has leaves messages on their way, and breaks the world.
        """
        # Not free: a thread is here, or this is a wait within the work itself.
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


class Background(Queue):
    """The calls of mpitrain.collectives. `comm` and `mover`, which works on it, are for them alone."""

    def __init__(self, comm: MPI.Comm, control: Control) -> None:
        super().__init__(control)
        self.comm = comm
        self.mover = Mover(comm, _TAG)
