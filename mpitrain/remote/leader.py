"""The leader: sends functions to free ranks, one at a time to each, and collects the answers as futures.

Its steps are work that every wait of the World drives. So answers come in while the leader waits in another call, and a
rank gets its next function as soon as the leader looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from mpitrain.errors import MpitrainError, RemoteError
from mpitrain.remote.execute import execute
from mpitrain.remote.frames import (
    CALL,
    END,
    END_AS_IT_IS,
    FAILURE,
    LONGEST_NAP_SECONDS,
    Frames,
    Message,
    RankLink,
    copied,
    unpack,
)
from mpitrain.waiting.control import patient_naps
from mpitrain.watching.activity import num_moved
from mpitrain.watching.ranges import rank_ranges
from mpitrain.world.world import World


class Leader:
    """The leader of a block, in the thread that has entered the block."""

    def __init__(self, world: World, device: str) -> None:
        """`world` has a communicator of its own. `device` is this rank's."""
        self._world = world
        self._device = device
        self._thread = threading.get_ident()
        self._open: list[RemoteFuture] = []  # without an answer, in the order of run_on
        self._untold: list[RemoteFuture] = []  # failed, and the program has not been told
        self._ending: int | None = None  # the message that ends the block
        self._steps = {rank: self._drive(rank) for rank in range(world.size) if rank != world.rank}
        self._looking = threading.Lock()
        world.control.open_tests.append(self.look)

    def name(self, rank: int | None = None) -> str:
        """The name of a rank, with its host. Default: this rank."""
        return self._world.name(rank)

    def names(self, ranks: Sequence[int]) -> str:
        """Several ranks in words."""
        return self.name(ranks[0]) if len(ranks) == 1 else f"ranks {rank_ranges(ranks)}"

    def check_thread(self) -> None:
        """Raise MpitrainError in another thread than that of the block."""
        if threading.get_ident() != self._thread:
            raise MpitrainError(
                f"{self.name()}: run_on in thread {threading.current_thread().name}; call it in the thread that "
                "entered mt.workers"
            )

    def add(self, name: str, ranks: tuple[int, ...], frames: Frames) -> RemoteFuture:
        """Take a function. If another rank of its place is free, wait until the arguments have left."""
        future = RemoteFuture(self, name, ranks, frames)
        self._open.append(future)
        self.look()
        if future.rank is not None:
            doing = f"send the arguments of {name} to {self.name(future.rank)}"
            self._world.control.wait(self._until(lambda: future.has_left), doing, (future.rank,))
        return future

    def look(self) -> None:
        """Make progress without waiting."""
        # Another thread of this rank may wait too, and drive the same work.
        if self._world.control.is_broken or not self._looking.acquire(blocking=False):
            return
        try:
            self._steps = {rank: steps for rank, steps in self._steps.items() if _goes_on(steps)}
            if self._ending is not None and not self._steps and self.look in self._world.control.open_tests:
                self._world.control.open_tests.remove(self.look)
        finally:
            self._looking.release()

    def wait_for(self, future: RemoteFuture, deadline: float = float("inf")) -> bool:
        """Wait until the function has ended, or until perf_counter() is `deadline`. Return whether it has ended.

        Functions that no other rank has taken, and that may run here, run here.
        """
        while future.answer is None and perf_counter() < deadline:
            self.look()
            own = self._take(self._world.rank)
            if own is not None:
                self._answer(own, execute(self._world, copied(own.frames), self._device))
            else:
                over = self._until(lambda: future.answer is not None or perf_counter() >= deadline)
                self._world.control.wait(over, future, future.ranks)
        return future.answer is not None

    def tell(self, future: RemoteFuture) -> None:
        """Note that the program has asked for this answer."""
        if future in self._untold:
            self._untold.remove(future)

    def drop(self, futures: Sequence[RemoteFuture], why: str) -> None:
        """Do not begin any of these. Their answers are not needed."""
        for future in futures:
            self.tell(future)
            if future in self._open:
                future.dropped = why
                self._open.remove(future)

    def finish(self) -> None:
        """Wait until all functions have ended, then end the block on every rank.

        Raises:
            RemoteError: a function has failed, and the program has not asked for its result.
        """
        while self._open:
            self.wait_for(self._open[0])
        self._ending = END
        self._wait_for_the_end()

    def abandon(self) -> None:
        """End the block because of an error, without waiting. Later waits drive the rest, at last the farewell's."""
        self.drop(tuple(self._open), "the block of mt.workers has ended by an error before it")
        self._ending = END_AS_IT_IS
        self._world.control.last_waits.append(self._end_all)
        self.look()

    def _wait_for_the_end(self) -> None:
        self._world.control.wait(self._until(lambda: not self._steps), "the end of mt.workers")

    def _end_all(self) -> None:
        if not self._world.control.is_broken:  # otherwise nothing more can be sent
            self._wait_for_the_end()

    def raise_untold(self) -> None:
        """Raise the first error whose result was never requested."""
        if self._untold:
            self._untold[0].result()

    def _drive(self, rank: int) -> Iterator[float | None]:
        """Steps that give functions to a rank, until the block ends."""
        link = RankLink(self._world.comm, rank)
        while True:
            while (future := self._take(rank)) is None:
                if self._ending is not None:
                    yield from link.send(self._ending, [])
                    return
                yield None
            yield from link.send(CALL, future.frames)
            future.has_left, future.frames = True, []
            self._answer(future, (yield from link.receive()))

    def _take(self, rank: int) -> RemoteFuture | None:
        """The first function that has not begun and may run on this rank."""
        for future in self._open:
            if future.rank is None and rank in future.ranks:
                future.rank = rank
                return future
        return None

    def _answer(self, future: RemoteFuture, answer: Message) -> None:
        future.answer, future.frames = answer, []
        if future in self._open:
            self._open.remove(future)
            if answer[0] == FAILURE:
                self._untold.append(future)

    def _until(self, test: Callable[[], bool]) -> Iterator[float]:
        """Steps until `test()` is true. They nap only while nothing moves."""
        nap, moved = patient_naps(LONGEST_NAP_SECONDS), num_moved()
        while True:
            self.look()
            if test():
                return
            if num_moved() != moved:
                nap, moved = patient_naps(LONGEST_NAP_SECONDS), num_moved()
            yield nap()


def _goes_on(steps: Iterator[float | None]) -> bool:
    try:
        next(steps)
    except StopIteration:
        return False
    return True


class RemoteFuture:
    """A function that `run_on` has sent, or will send when a rank of its place is free. Only the leader has it.

    Attributes:
        name: the name of the function.
        ranks: the ranks of its place.
        rank: the rank that runs it, or has run it; None: it has not begun.
    """

    def __init__(self, leader: Leader, name: str, ranks: tuple[int, ...], frames: Frames) -> None:
        """`frames` are those of the function and its arguments."""
        self.name = name
        self.ranks = ranks
        self.rank: int | None = None
        self.frames = frames
        self.has_left = False  # the arguments have been sent, or are there
        self.answer: Message | None = None
        self.dropped = ""  # why there will be no answer
        self._leader = leader
        self._value: Any = None
        self._is_unpacked = False

    def __str__(self) -> str:
        """The operation in which a wait for it waits, for messages."""
        if self.rank is None:
            return f"run_on, for a free rank for {self.name}"
        return f"run_on, for {self.name} on {self._leader.name(self.rank)}"

    def done(self) -> bool:
        """Whether the function has ended, by a result or by an error. Does not wait."""
        self._leader.look()
        return self.answer is not None

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Wait for the function to end, and return its result. Functions for the leader itself run here.

        Args:
            timeout_seconds: the time to wait. Default: as long as it takes. The function continues after a timeout, and
                `result` can be called again. A function that runs on the leader itself is not cut short.

        Raises:
            RemoteError: the function has raised an error. The text has the rank, its host and the traceback there. Or
                its result cannot be made here.
            TimeoutError: the function has not ended in time.
            MpitrainError: the block of `mt.workers` has ended before the function did.
        """
        if self.answer is None and not self.dropped:
            deadline = float("inf") if timeout_seconds is None else time.perf_counter() + timeout_seconds
            if not self._leader.wait_for(self, deadline):
                raise TimeoutError(
                    f"{self._leader.name()}: {self._state()} after {timeout_seconds:g} s. It continues: call result() "
                    "again, or end the job"
                )
        if self.answer is None:
            raise MpitrainError(f"{self._leader.name()}: {self.name}: {self.dropped}")
        kind, frames = self.answer
        self._leader.tell(self)
        if not self._is_unpacked:
            self._value, self._is_unpacked = self._unpacked(frames), True
            self.answer = kind, []  # the arrays of the value keep their memory
        if kind == FAILURE:
            assert self.rank is not None
            raise self._value.error(self._leader.name(self.rank))
        return self._value

    def _unpacked(self, frames: Frames) -> Any:
        try:
            return unpack(frames)
        except Exception as error:
            assert self.rank is not None
            problem = RemoteError(
                f"{self._leader.name(self.rank)}: the result of {self.name} cannot be made on {self._leader.name()}: "
                f"{type(error).__name__}: {error}. Return arrays, numbers, text and nestings of them"
            )
            problem.kind = type(error).__name__
            raise problem from error

    def _state(self) -> str:
        if self.rank is None:
            return f"no rank of {self._leader.names(self.ranks)} was free for {self.name}"
        return f"{self.name} on {self._leader.name(self.rank)} has not returned"
