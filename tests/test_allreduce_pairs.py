"""The phases of recursive_doubling and halving_doubling, of all ranks together, without MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy
import pytest

from mpitrain.allreduce.group import segments
from mpitrain.allreduce.halving_doubling import doubling_plan, halving_plan
from mpitrain.allreduce.halving_doubling import plan as plan_of_both
from mpitrain.allreduce.pairs import Phase
from mpitrain.allreduce.recursive_doubling import plan as recursive_doubling

Plan = Callable[[int, int, int], list[Phase]]


def halving_doubling(count: int, place: int, size: int) -> list[Phase]:
    return plan_of_both(segments(count, size), place)


PLANS = [recursive_doubling, halving_doubling]


def run(plan: Plan, count: int, size: int) -> tuple[numpy.ndarray, list[list[Phase]]]:
    """How often each rank's element is in the sum that each rank has at the end: [rank, element, of rank]."""
    terms = numpy.zeros((size, count, size), int)
    for rank in range(size):
        terms[rank, :, rank] = 1
    phases = [plan(count, rank, size) for rank in range(size)]
    todo = [deque(its) for its in phases]
    while any(todo):
        # Two ranks continue when each one is what the other one waits for, with what it waits for.
        pairs = [(a, todo[a][0].partner) for a in range(size) if todo[a] and todo[todo[a][0].partner]]
        ready = [(a, b) for a, b in pairs if a < b and todo[b][0].partner == a]
        assert ready, "all wait for each other"
        a, b = ready[0]
        mine, other = todo[a].popleft(), todo[b].popleft()
        assert (mine.send, mine.receive) == (other.receive, other.send)
        before = terms.copy()
        for rank, phase, source in ((a, mine, b), (b, other, a)):
            base = before[rank, phase.receive] if phase.adds else 0
            terms[rank, phase.receive] = base + before[source, phase.receive]
    return terms, phases


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("count", [1, 2, 5, 16, 61])
def test_every_rank_ends_with_every_ranks_numbers_once(plan: Plan, size: int, count: int) -> None:
    terms, _ = run(plan, count, size)
    assert (terms == 1).all()


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("count", [1, 5, 61])
def test_each_half_by_itself(size: int, count: int) -> None:
    """Of the first one, a rank needs its own part. The second one brings each part, as its rank has it, to all."""
    parts = segments(count, size)
    scattered, _ = run(lambda _count, place, _size: halving_plan(parts, place), count, size)
    gathered, _ = run(lambda _count, place, _size: doubling_plan(parts, place), count, size)
    for rank, part in enumerate(parts):
        assert (scattered[rank, part] == 1).all()
        assert (gathered[:, part] == (numpy.arange(size) == rank)).all()


@pytest.mark.parametrize(("plan", "factor"), [(recursive_doubling, 3), (halving_doubling, 2 * 7 / 8)])
def test_what_eight_ranks_send(plan: Plan, factor: float) -> None:
    """The cost that the docstrings state."""
    _, phases = run(plan, 800, 8)
    for its in phases:
        assert sum(phase.send.stop - phase.send.start for phase in its) == factor * 800
        assert len(its) == (3 if plan is recursive_doubling else 6)


def test_two_more_phases_for_a_number_that_is_no_power_of_two() -> None:
    _, phases = run(recursive_doubling, 10, 7)
    assert [len(its) for its in phases] == [2, 4, 2, 4, 2, 4, 2]
