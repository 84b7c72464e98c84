"""What this rank does, as it publishes it: whatever it waits in, and whatever MPI does.

A wait is written into rank_record.py when it has lasted 0.1 s, and when it ends, so waits that are in order
cost nothing. On a signal faulthandler writes the Python stacks of all threads into memory beside it; it does not need
Python's lock for that, and the main thread may be anywhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpitrain.watching.rank_record import FAILED, NAME, STACK_SIGNAL, WORKS, Page, RankRecord
from mpitrain.watching.roll_call import appear


class Activity:
    """This rank's record. Writing into it costs a microsecond or less.

    Attributes:
        descriptor: of the record, for those who read it.
    """

    def __init__(self, rank: int) -> None:
        self._process = os.getpid()
        self._page = Page(rank)
        self.descriptor = self._page.descriptor
        self._moved = self._first_step = 0
        self._doing: list[tuple[int, str, float]] = []  # the last one counts: waits are made in waits, and in threads
        self._line: socket.socket | None = None
        self._writing = threading.Lock()
        self._record = RankRecord(rank, pid=self._process)
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            stacks = os.memfd_create(f"{NAME}{rank}-stacks")
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
            self._record = replace(self._record, stacks=stacks)
        self._write()

    def appear(self, roll_call: str) -> None:
        """Tell the guard who made this roll call that the rank is here. For as long as the process lives."""
        self._line = appear(roll_call, self._record.rank, self.descriptor)
        # The line tells the guard when this process ends: a child must not hold it open.
        os.register_at_fork(after_in_child=self._hang_up)

    def enter(self, phase: str) -> None:
        """It has come so far."""
        if self._record.phase != FAILED:  # its end is on the way then
            self._change(phase=phase)

    def fail(self, error: str, seconds: float) -> None:
        """It has failed with this, at that time.monotonic()."""
        self._change(phase=FAILED, error=error, failed_seconds=seconds)

    def lose(self, ranks: Sequence[int]) -> None:
        """It goes on without these."""
        self._change(lost=tuple(ranks))

    def begin(self, status: int, words: str, since: float) -> tuple[int, str, float]:
        """It does this now, since so many seconds of time.monotonic(); the result is for `end`."""
        entry = (status, words, since)
        self._doing.append(entry)
        self._write()
        return entry

    def end(self, entry: tuple[int, str, float]) -> None:
        """It does that no more."""
        with contextlib.suppress(ValueError):
            self._doing.remove(entry)
        self._write()

    def set_limits(self, stall_seconds: float, hang_seconds: float) -> None:
        """After how long a wait is reported, and ends the job."""
        self._change(stall_seconds=stall_seconds, hang_seconds=hang_seconds)

    def count_call(self, calls: int) -> None:
        """It has begun so many calls that all ranks make."""
        self._page.set_calls(calls)

    def count_moved(self) -> None:
        """Something has come or gone: this rank's wait is one in which something moves."""
        self._moved += 1
        self._page.set_moved(self._moved)

    def begin_step(self, step: int) -> None:
        """It begins this step."""
        self._first_step = self._first_step or step
        self._page.set_step(self._first_step, step)

    def report(self, metrics: Mapping[str, float]) -> None:
        """The newest values of these."""
        if self._page.set_metrics(metrics):
            self._write()

    @property
    def moved(self) -> int:
        """How often something has come or gone."""
        return self._moved

    @property
    def stall_seconds(self) -> float:
        """After how long a wait is reported."""
        return self._record.stall_seconds

    @property
    def hang_seconds(self) -> float:
        """After how long a wait ends the job; 0: never."""
        return self._record.hang_seconds

    def _change(self, **fields: object) -> None:
        self._record = replace(self._record, **fields)  # type: ignore[arg-type]  # of the record, as its callers say
        self._write()

    def _write(self) -> None:
        if os.getpid() != self._process:  # a forked child shares the memory
            return
        with self._writing:  # threads wait too, and must not take back what another one has just written
            status, words, since = self._doing[-1] if self._doing else (WORKS, "", time.monotonic())
            self._page.write(self._record, status, words, since)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()


_activity: Activity | None = None


def own_activity() -> Activity | None:
    """This process's; None where it is alone."""
    return _activity


def count_moved() -> None:
    """Something has come or gone, of what this process waits for."""
    if _activity is not None:
        _activity.count_moved()


def num_moved() -> int:
    """How often something has come or gone in this process."""
    return 0 if _activity is None else _activity.moved


def publish(rank: int) -> Activity:
    """Begin to publish what this process does; once a process."""
    global _activity  # noqa: PLW0603 - a process is one rank
    if _activity is None:
        _activity = Activity(rank)
    return _activity
