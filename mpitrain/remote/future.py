"""The future of a function that runs on another rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpitrain.errors import MpitrainError, RemoteError
from mpitrain.remote.frames import Frames, unpack
from mpitrain.remote.link import FAILURE, Message

if TYPE_CHECKING:
    from mpitrain.remote.leader import Leader


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
        """What a wait for it waits in, for messages."""
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
            timeout_seconds: the time to wait. Default: as long as it takes. The function goes on after a timeout, and
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
                    f"{self._leader.name()}: {self._state()} after {timeout_seconds:g} s. It goes on: call result() "
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
        return f"{self.name} on {self._leader.name(self.rank)} has not come back"
