"""What chaos did to a job, and the course of the job over time, from what its ranks publish. All functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from testbed.chaos.plan import Fault


@dataclass(frozen=True)
class Point:
    """A job at a moment.

    Attributes:
        seconds: after the start of chaos.
        attempt: how often the launcher has started the job, counted from what chaos has seen; 1 is the first one.
        first_step: the first step that a rank began in this attempt; 0: none yet.
        step: the last step that any rank has begun in this attempt; 0: none yet.
        num_ranks: how many ranks take part.
        samples_per_second: of the last step, of all ranks, as a rank has published it.
        is_done: all ranks have reached their end.
    """

    seconds: float
    attempt: int
    first_step: int
    step: int
    num_ranks: int
    samples_per_second: float = 0.0
    is_done: bool = False


@dataclass(frozen=True)
class WentOn:
    """How a job continued after a fault.

    Attributes:
        seconds: from the fault to the end of the first step that the victim cannot have made before.
        from_step: the first step of the new attempt; 0: the job continued in place.
        repeated_steps: the steps that were made a second time.
    """

    seconds: float
    from_step: int = 0
    repeated_steps: int = 0


def went_on(points: Sequence[Point], seconds: float, attempt: int, step: int) -> WentOn | None:
    """Return how the job continued after a fault; None: it has not yet.

    The others can end the step that the victim was in, because it may have sent its part. They cannot end the next one.
    A step has ended when a rank begins the one behind it.

    Args:
        points: in order of time.
        seconds: when the fault came.
        attempt: the attempt that it hit.
        step: the last step that the victim had begun.
    """
    top = 0
    for point in points:
        after_seconds = point.seconds - seconds
        if point.attempt == attempt:
            if after_seconds > 0 and (point.step >= step + 2 or point.is_done):
                return WentOn(after_seconds)
            top = max(top, point.step)
        elif point.attempt > attempt and (point.is_done or 0 < point.first_step < point.step):
            return WentOn(after_seconds, point.first_step, max(0, top - point.first_step))
    return None


def steps_between(points: Sequence[Point], begin: float, end: float) -> tuple[int, float]:
    """Return how many new steps were begun between two times, and in how many seconds that was observed.

    A step that is made a second time is not new.
    """
    top = first = last = 0
    began = ended = 0.0
    for point in points:
        top = max(top, point.step)
        if begin <= point.seconds <= end and top:
            if not first:
                first, began = top, point.seconds
            last, ended = top, point.seconds
    return last - first, ended - began


def rate(points: Sequence[Point], begin: float, end: float) -> float:
    """Return the new steps per second between two times; 0 if nothing was observed."""
    steps, seconds = steps_between(points, begin, end)
    return steps / seconds if seconds > 0 else 0.0


def samples_per_second(points: Sequence[Point], begin: float, end: float) -> float:
    """Return the median of what ranks published between two times; 0: they published nothing."""
    published = [point.samples_per_second for point in points if begin <= point.seconds <= end]
    return statistics.median([speed for speed in published if speed] or [0.0])


def kept(points: Sequence[Point], faults: Sequence[float]) -> tuple[float, float]:
    """Return which share of the undisturbed steps was made; and the same where lost ranks were not expected to work.

    The rate before the first fault is the undisturbed one. The second number expects of the time between two faults
    only the share of the ranks that took part at the end of that time.
    """
    moving = [point for before, point in pairwise(points) if point.step != before.step]
    if not faults or not moving:
        return 1.0, 1.0
    begin, end = points[0].seconds, moving[-1].seconds
    undisturbed = rate(points, begin, faults[0])
    steps, _ = steps_between(points, begin, end)
    bounds = [begin, *(seconds for seconds in faults if begin < seconds < end), end]
    capacity = 0.0
    for left, right in pairwise(bounds):
        ranks = [point.num_ranks for point in points if left < point.seconds <= right]
        capacity += (right - left) * (ranks[-1] if ranks else points[0].num_ranks) / points[0].num_ranks
    if not undisturbed or end <= begin:
        return 0.0, 0.0
    return steps / (undisturbed * (end - begin)), steps / (undisturbed * capacity)


@dataclass
class Hit:
    """A fault as it was made.

    Attributes:
        fault: as planned.
        seconds: when it was made, after the start of chaos.
        rank: the rank that it hit; None: more than one rank, or none.
        host: the host that it hit.
        attempt: the job's attempt that it hit.
        step: the last step that the victim had begun; None: not known yet.
        deed: the fault, in words.
        why_not: why the fault was not made; "": it was made.
        is_undone: the fault is not in force any more.
        went_on: how the job continued; None: it has not gone on yet.
    """

    fault: Fault
    seconds: float
    rank: int | None
    host: str
    attempt: int
    step: int | None = None
    deed: str = ""
    why_not: str = ""
    is_undone: bool = True
    went_on: WentOn | None = None

    @property
    def victim(self) -> str:
        """Text such as "rank 2 on node1"."""
        return self.host if self.rank is None else f"rank {self.rank} on {self.host}"


@dataclass
class Episode:
    """What was seen of a job under chaos.

    Attributes:
        points: in order of time.
        hits: the faults.
        said: lines of the launcher about the job, with the time at which each was seen.
        hears: whether the launcher's output can be read.
        seconds: how long chaos took.
        has_ended: whether the job is over.
        news: what became of the connections to hosts, with the time of each line.
        unseen: the hosts on which the last ranks may not have been seen.
        error: why the job has failed, as far as its hosts were seen; "": the job has not failed.
        left: what is left of the job, by host.
    """

    points: list[Point] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    hears: bool = False
    seconds: float = 0.0
    has_ended: bool = False
    news: list[tuple[float, str]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    error: str = ""
    left: dict[str, list[str]] = field(default_factory=dict)
