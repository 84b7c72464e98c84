"""The course of a job over time, from what its ranks publish: pure functions of points in time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


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
    """How a job went on after a fault.

    Attributes:
        seconds: from the fault to the end of the first step that the victim cannot have made before.
        from_step: the first step of the new attempt; 0: the job went on in place.
        repeated_steps: the steps that were made a second time.
    """

    seconds: float
    from_step: int = 0
    repeated_steps: int = 0


def went_on(points: Sequence[Point], seconds: float, attempt: int, step: int) -> WentOn | None:
    """Return how the job went on after a fault; None: it has not yet.

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
