"""How a job went on after a fault, computed from points in time."""

from __future__ import annotations

import pytest

from testbed.chaos.episode import Point, WentOn, kept, rate, samples_per_second, went_on


def points(*steps: tuple[float, int, int], first: int = 1, ranks: int = 4) -> list[Point]:
    """Points from (seconds, attempt, step)."""
    return [
        Point(seconds, attempt, first if attempt > 1 else 1, step, ranks, 100.0 * step)
        for seconds, attempt, step in steps
    ]


def test_in_place() -> None:
    """The others may end step 5, in which the victim was, but not step 6."""
    seen = points((1.0, 1, 4), (2.0, 1, 5), (2.1, 1, 6), (2.5, 1, 6), (2.75, 1, 7))
    assert went_on(seen, 2.05, 1, 5) == WentOn(pytest.approx(0.7))
    assert went_on(seen[:-1], 2.05, 1, 5) is None
    assert went_on(seen, 2.05, 1, 4) == WentOn(pytest.approx(0.05))


def test_a_new_attempt() -> None:
    """The job goes on when it has made its first step, step 4. It repeats steps 4 and 5."""
    seen = points((1.0, 1, 5), (2.0, 1, 6), (4.0, 2, 0), (5.0, 2, 4), (5.5, 2, 5), first=4)
    assert went_on(seen, 2.0, 1, 5) == WentOn(3.5, 4, 2)
    assert went_on(seen[:-1], 2.0, 1, 5) is None


def test_the_end_of_the_program_counts() -> None:
    seen = [*points((1.0, 1, 9), (2.0, 1, 10)), Point(3.0, 1, 1, 10, 4, is_done=True)]
    assert went_on(seen, 1.5, 1, 9) == WentOn(1.5)


def test_rates_count_no_step_twice() -> None:
    seen = points((0.0, 1, 10), (5.0, 1, 20), (6.0, 2, 15), (10.0, 2, 30))
    assert rate(seen, 0.0, 5.0) == 2.0
    assert rate(seen, 5.0, 10.0) == 2.0
    assert rate(seen, 5.5, 6.5) == 0.0
    assert rate(seen, 20.0, 30.0) == 0.0
    assert samples_per_second(seen, 0.0, 10.0) == 1750.0
    assert samples_per_second(seen, 20.0, 30.0) == 0.0


def test_what_is_kept() -> None:
    """2 steps/s before the fault at 10 s; 10 s without a step; then 2 steps/s again, with half of the ranks."""
    before = points(*((float(second), 1, 1 + 2 * second) for second in range(11)))
    after = points(*((float(second), 1, 1 + 2 * (second - 10)) for second in range(20, 31)), ranks=2)
    share, of_capacity = kept([*before, *after], [10.0])
    assert share == pytest.approx(40 / 60)
    assert of_capacity == pytest.approx(40 / (2 * (10 + 20 / 2)))
    assert kept(before, []) == (1.0, 1.0)
    assert kept([], [1.0]) == (1.0, 1.0)
