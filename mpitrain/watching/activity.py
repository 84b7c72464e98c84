"""What this rank publishes about its activity: its waits, and the progress of MPI.

A wait is written into rank_record.py after it has lasted 0.1 s, and when it ends. So short waits cost nothing. On a
signal, faulthandler writes the Python stacks of all threads into memory beside the record. It needs no Python lock for
this, so the main thread may be anywhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from mpitrain.watching.order import TrainingOrder
from mpitrain.watching.rank_record import FAILED, NAME, STACK_SIGNAL, WAITS, WORKS, Page, RankRecord
from mpitrain.watching.roll_call import OpenLine, appear
from mpitrain.watching.served_record import ServedPage

# About 100 bytes each here, and 150 in the file. A trace is for some minutes; a run of days would fill the memory.
MOST_SPANS = 200_000


class Span(NamedTuple):
    """One thing that this rank did. `begin` and `end` are values of time.perf_counter() in this process."""

    lane: str  # "compute", "wait" or "wire"
    name: str
    begin: float
    end: float
    about: dict[str, Any]


class Spans:
    """A list of Span that stops growing at MOST_SPANS. All threads may add to it."""

    def __init__(self) -> None:
        self.kept: list[Span] = []
        self.num_left_out = 0

    def add(self, lane: str, name: str, begin: float, end: float, **about: Any) -> None:
        """Keep a span. A trace shows `about` with it."""
        if len(self.kept) < MOST_SPANS:
            self.kept.append(Span(lane, name, begin, end, about))
        else:
            self.num_left_out += 1


class Activity:
    """This rank's record. A write into the record costs a microsecond or less.

    Attributes:
        descriptor: descriptor of the record, for its readers.
        publish: `publish("step", 7)` publishes a fact of rank_facts.FACTS; see Page.publish.
    """

    def __init__(self, rank: int, pid: int) -> None:
        self._process = os.getpid()
        self._page = Page(rank)
        self.descriptor = self._page.descriptor
        self.publish = self._page.publish
        self._moved = self._first_step = 0
        self._waited = 0.0
        self._doing: list[tuple[int, str, float]] = []  # the last one is published: waits can be nested, and in threads
        self._line: OpenLine | None = None
        self._served: ServedPage | None = None
        self._writing = threading.Lock()
        self._after_first_step: Callable[[], object] | None = None
        self._record = RankRecord(rank, pid=pid or self._process)
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            stacks = os.memfd_create(f"{NAME}{rank}-stacks")
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
            self._record = replace(self._record, stacks=stacks)
        self._write()

    def appear(self, roll_call: str, starter: int = 0) -> None:
        """Register the rank with the agent at this socket, for as long as the process lives.

        `starter` is the process of mpiexec that started the rank; 0: the parent of this process.
        """
        self._line = appear(roll_call, self._record.rank, self.descriptor, starter)
        # The connection tells the agent when this process ends: a child must not hold it open.
        os.register_at_fork(after_in_child=self._hang_up)

    def enter(self, phase: str) -> None:
        """Publish that the rank has reached this phase."""
        if self._record.phase != FAILED:  # a failed rank is already ending
            self._change(phase=phase)

    def fail(self, error: str, seconds: float) -> None:
        """Publish that the rank has failed with `error`, at `seconds` of time.monotonic()."""
        self._change(phase=FAILED, error=error, failed_seconds=seconds)

    def lose(self, ranks: Sequence[int]) -> None:
        """Publish that the World continues without these ranks."""
        self._change(lost=tuple(ranks))

    def begin(self, status: int, words: str, since: float) -> tuple[int, str, float]:
        """Publish what the rank has been doing since `since`, by time.monotonic(). Pass the result to `end`."""
        entry = (status, words, since)
        self._doing.append(entry)
        self._write()
        return entry

    def end(self, entry: tuple[int, str, float]) -> None:
        """Publish that the rank has stopped doing that."""
        with contextlib.suppress(ValueError):
            self._doing.remove(entry)
        self._write()

    def set_limits(self, stall_seconds: float, hang_seconds: float) -> None:
        """Set the times after which a wait is reported, and ends the job."""
        self._change(stall_seconds=stall_seconds, hang_seconds=hang_seconds)

    def count_call(self, calls: int) -> None:
        """Publish how many calls the rank has begun, counting calls that all ranks make."""
        self._page.set_calls(calls)

    def count_moved(self) -> None:
        """Note that data has arrived or left, so this rank's wait makes progress."""
        self._moved += 1
        self._page.set_moved(self._moved)

    def add_waited(self, seconds: float) -> None:
        """Count the time of a wait for other ranks that has ended."""
        self._waited = waited = self._waited + seconds
        self.publish("waited", waited)

    def begin_step(self, step: int) -> None:
        """Publish that the rank begins this step."""
        if not self._first_step:
            self._first_step = step
            self._page.set_first_step(step)
        self.publish("step", step)
        if self._after_first_step is not None and step > self._first_step:
            call, self._after_first_step = self._after_first_step, None
            call()

    def after_first_step(self, call: Callable[[], object]) -> None:
        """Call `call` once, as soon as this rank has made a step."""
        self._after_first_step = call

    def leave(self, step: int) -> None:
        """Publish that the rank ends after this step, for another attempt to continue from there."""
        self._page.set_left(step, time.monotonic())

    def copy_run(self, run: int) -> None:
        """Publish the number of the run whose in-memory checkpoints the rank takes from now on; 0: none."""
        self._page.set_run(run)

    def note_checkpoint(self) -> None:
        """Publish that there is a checkpoint from which another attempt can continue. Any thread may call."""
        self._page.set_checkpoint()

    def tell_end(self) -> None:
        """Publish that SIGTERM has told this rank to end."""
        self._page.set_told()

    def get_ready(self) -> None:
        """Publish that this rank can take over from the earlier ranks."""
        self._page.set_ready()

    @property
    def order_number(self) -> int:
        """The number of the newest command to the training that has arrived here; 0: none."""
        return self._page.order_number

    def order(self) -> TrainingOrder:
        """The newest command; see launch/orders.py. Raises ValueError if it is malformed or damaged."""
        return TrainingOrder.of_plain(self._page.order())

    def steer(self, text: str) -> None:
        """Publish the commands that the training accepts; see RankRecord.steering."""
        with self._writing:
            self._page.set_steering(text)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Publish the newest values of these metrics."""
        if self._page.set_metrics(metrics):
            self._write()

    def keep_record(self, folder: str) -> None:
        """Publish that the rank writes the record of the run into `folder`, an absolute path."""
        self._change(record_folder=folder)

    def serve(self, facts: Mapping[str, Any]) -> None:
        """Publish what this rank, as a server, knows about its workers; see server.status."""
        if self._served is None:
            self._served = ServedPage()
        self._served.write(facts)

    @property
    def moved(self) -> int:
        """The number of times that data has arrived or left."""
        return self._moved

    @property
    def stall_seconds(self) -> float:
        """The time after which a wait is reported."""
        return self._record.stall_seconds

    @property
    def hang_seconds(self) -> float:
        """The time after which a wait ends the job; 0: never."""
        return self._record.hang_seconds

    def _change(self, **fields: object) -> None:
        self._record = replace(self._record, **fields)  # type: ignore[arg-type]  # of the record, as its callers say
        self._write()

    def _write(self) -> None:
        if os.getpid() != self._process:  # a forked child shares the memory
            return
        with self._writing:  # threads wait too, and must not overwrite each other's newer state
            status, words, since = self._doing[-1] if self._doing else (WORKS, "", time.monotonic())
            self._page.write(self._record, status, words, since)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()


_activity: Activity | None = None


def own_activity() -> Activity | None:
    """Return the Activity of this process; None if the process is alone."""
    return _activity


def count_moved() -> None:
    """Note that data for which this process waits has arrived or left."""
    if _activity is not None:
        _activity.count_moved()


def note_checkpoint() -> None:
    """Publish that this process has taken a checkpoint, in memory or on disk, or resumed from one."""
    if _activity is not None:
        _activity.note_checkpoint()


def num_moved() -> int:
    """Return how often data has arrived or left in this process."""
    return 0 if _activity is None else _activity.moved


def num_orders() -> int:
    """Return the number of the newest command to the training that has reached this process; 0: none."""
    return 0 if _activity is None else _activity.order_number


@contextmanager
def waiting(doing: str) -> Iterator[None]:
    """Run an MPI call that waits for other ranks and that only MPI can drive: publish that this rank waits in it.

    So the agent reports the wait, and ends the job if the wait lasts too long.
    """
    begun = time.monotonic()
    entry = _activity.begin(WAITS, doing, begun) if _activity is not None else None
    try:
        yield
    finally:
        if _activity is not None and entry is not None:
            _activity.end(entry)
            _activity.add_waited(time.monotonic() - begun)


def publish(rank: int, pid: int = 0) -> Activity:
    """Begin to publish what this process does; once per process.

    `pid` is the process that mpiexec considers the rank; 0: this one.
    """
    global _activity  # noqa: PLW0603 - a process is one rank
    if _activity is None:
        _activity = Activity(rank, pid)
    return _activity
