"""A trace of a job: each rank's computation, waits and communication, on one time axis.

Each rank records its spans by its own clock. At the end rank 0 gathers them, converts them to its clock, and writes one
file in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing show.

Two clocks are compared by round trips: rank 0 sends at t0, the other rank answers with its time t, the answer arrives
at t1. The answer was sent between t0 and t1, so at (t0 + t1) / 2 with an error of at most half the round trip. The
shortest of many round trips is used. Clocks also run at slightly different rates, about 10 us per second apart. So they
are compared at the beginning and at the end, and the offsets in between are interpolated linearly.

Sources: Cristian, Probabilistic clock synchronization (1989); Mills, RFC 5905 (NTP version 4), section 8, where the
sample of the least delay is chosen as well; Google, Trace Event Format (2016).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.waiting.control import until
from mpitrain.watching.activity import Span, Spans
from mpitrain.watching.rank_record import ENDED

if TYPE_CHECKING:
    from mpitrain.job.job import Job
    from mpitrain.world.world import World

_ROUND_TRIPS = 30
_LANES = ("compute", "wait", "wire")
FILE = "trace.json"


@dataclass(frozen=True)
class Clock:
    """The offset of a rank's clock from rank 0's, in seconds.

    Attributes:
        at: this rank's time of the comparison.
        offset: what to add to this rank's times.
        error: the largest possible error of the offset.
    """

    at: float
    offset: float
    error: float


def compare_clocks(world: World) -> Clock:
    """Compare this rank's clock with rank 0's. Collective; takes 30 round trips per other rank, one after the other."""
    clock = Clock(time.perf_counter(), 0.0, 0.0)
    world.agree("compare clocks")
    for rank in range(1, world.size):
        if world.is_root:
            best = min(_round_trips(world, rank), key=lambda trip: trip.error)
            _send(world, rank, best.at, best.offset, best.error)
        elif world.rank == rank:
            for _ in range(_ROUND_TRIPS):
                _receive(world, 0)
                _send(world, 0, time.perf_counter())
            clock = Clock(*_receive(world, 0))
    world.agree("have compared clocks")
    return clock


def _round_trips(world: World, rank: int) -> Iterator[Clock]:
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        _send(world, rank, begin)
        there, *_ = _receive(world, rank)
        end = time.perf_counter()
        yield Clock(there, (begin + end) / 2 - there, (end - begin) / 2)


def _send(world: World, to: int, *numbers: float) -> None:
    """Send or receive at most three numbers; such a short message is sent at once."""
    world.objects.Send(numpy.array([*numbers, 0.0, 0.0])[:3], to)


def _receive(world: World, source: int) -> list[float]:
    numbers = numpy.empty(3)
    request = world.objects.Irecv(numbers, source)
    world.control.wait(until(request.Test), f"compare clocks with {world.name(source)}")
    return [float(number) for number in numbers]


class Trace:
    """A trace of this job from now to its end."""

    def __init__(self, job: Job, directory: Path) -> None:
        """Collective over the job's current World.

        Raises:
            ConfigError: rank 0 cannot write into `directory`. Raised on every rank.
        """
        world = job.world
        self._job = job
        self._path = directory / FILE
        with world.together(f"write a trace into {directory}"):
            if world.is_root:
                directory.mkdir(parents=True, exist_ok=True)
                _write(self._path, "")  # a file that cannot be written fails now, not after hours
        self._begin, self._root = compare_clocks(world), world.control.members[0]
        self._spans = world.control.spans = Spans()

    def finish(self) -> None:
        """Gather all ranks' spans and write them. Collective; called at the end of every rank."""
        world = self._job.world
        spans, world.control.spans = self._spans, None
        if world.control.is_broken:
            return
        try:
            # Ranks reach their ends at different times, and one may keep working alone for long, as before `farewell`.
            others = world.begin_agreement("end the trace")
            world.control.wait(until(others.test, lambda: 0.001), "the end of the others", status=ENDED)
            end = compare_clocks(world)
            # The first comparison was with a rank that has been lost, perhaps on another host, if there is a new root.
            begin = self._begin if world.control.members[0] == self._root else end
            kept = [moved(span, begin, end) for span in spans.kept]
            of_all = world.gather((kept, spans.num_left_out, max(begin.error, end.error)))
            if of_all is None:
                return
            _write(self._path, json.dumps(document(world.hosts, of_all)))
        except (KeyboardInterrupt, Exception) as error:
            # An exception in an exit function does not change the exit code, and the other ranks would wait.
            self._job.end(error)
        if lost := sum(num_left_out for _, num_left_out, _ in of_all):
            print(f"mpitrain: the trace {self._path} lacks the last {lost:,} spans", file=sys.stderr, flush=True)


def moved(span: Span, begin: Clock, end: Clock) -> Span:
    """Convert `span` to rank 0's clock, with the offset interpolated between the beginning and the end."""
    rate = (end.offset - begin.offset) / (end.at - begin.at) if end.at > begin.at else 0.0

    def there(here: float) -> float:
        return here + begin.offset + rate * (here - begin.at)

    return span._replace(begin=there(span.begin), end=there(span.end))


def document(hosts: Sequence[str], of_all: Sequence[tuple[Sequence[Span], int, float]]) -> dict[str, Any]:
    """Return the file's content: `of_all` has each rank's spans, how many it lacks, and its largest clock error."""
    start = min((span.begin for spans, _, _ in of_all for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, (spans, _, _) in enumerate(of_all):
        events += [
            _named(rank, 0, "process_name", name=f"rank {rank} on {hosts[rank]}"),
            _named(rank, 0, "process_sort_index", sort_index=rank),
        ]
        for number, lane in enumerate(_LANES):
            # Spans that overlap in one lane, such as two buckets in flight, need separate rows.
            ends: list[float] = []
            for span in sorted((span for span in spans if span.lane == lane), key=lambda span: span.begin):
                row = next((row for row, free in enumerate(ends) if free <= span.begin), len(ends))
                ends[row : row + 1] = [span.end]
                events.append(
                    {
                        "ph": "X",
                        "cat": lane,
                        "name": span.name,
                        "pid": rank,
                        "tid": 100 * number + row,
                        "ts": (span.begin - start) * 1e6,  # microseconds
                        "dur": (span.end - span.begin) * 1e6,
                        "args": span.about,
                    }
                )
            for row in range(len(ends)):
                tid = 100 * number + row
                events.append(_named(rank, tid, "thread_name", name=lane if row == 0 else f"{lane} {row + 1}"))
                events.append(_named(rank, tid, "thread_sort_index", sort_index=tid))
    errors = [round(error * 1e6, 3) for _, _, error in of_all]
    left_out = [num_left_out for _, num_left_out, _ in of_all]
    about = {"clock_error_us_of_rank": errors, "spans_left_out_of_rank": left_out}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(rank: int, tid: int, kind: str, **value: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": value}


def _write(path: Path, text: str) -> None:
    """Write the whole file, or nothing."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(text)
        if text:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
