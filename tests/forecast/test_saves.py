"""How often to save: against Daly's model, by hand, and without failures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest

from mpitrain.errors import ConfigError
from mpitrain.forecast.saves import (
    Failing,
    daly_seconds,
    expected_seconds,
    saves_report,
    simulate_failures,
    young_seconds,
)

# A failure every 1000 s.
FAILING = Failing(20_000.0, 8000.0, 8, save_seconds=20.0, restart_seconds=50.0)


class Gaps:
    """Failures at given distances, in place of random ones."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = list(gaps)

    def exponential(self, mean: float) -> float:
        assert mean == 1000.0
        return self.gaps.pop(0)


def by_hand(*gaps: float, every: float = 300.0, work: float = 1000.0) -> float:
    return simulate_failures(replace(FAILING, work_seconds=work), every, Gaps(*gaps))  # type: ignore[arg-type]


def test_without_a_failure() -> None:
    """Work, and a save after each interval and at the end."""
    assert by_hand(1e9) == 1000 + 4 * 20
    assert by_hand(1e9, every=500) == 1000 + 2 * 20
    assert by_hand(1e9, every=5000) == 1000 + 20


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        ((100, 1e9), 100 + 50 + 1080),  # in the first interval: all of it is lost
        ((319, 1e9), 319 + 50 + 1080),  # in the first save: it does not count
        ((320, 1e9), 320 + 50 + 700 + 3 * 20),  # after it
        ((700, 1e9), 700 + 50 + 400 + 2 * 20),  # after the second one
        ((700, 49, 1e9), 700 + 49 + 50 + 400 + 2 * 20),  # and once more during the restart
        ((700, 369, 1e9), 700 + 369 + 50 + 400 + 2 * 20),  # and just before the save that would count
        ((700, 370, 1e9), 700 + 370 + 50 + 100 + 20),
        ((1079, 1e9), 1079 + 50 + 100 + 20),  # in the last save
    ],
)
def test_failures_by_hand(gaps: tuple[float, ...], seconds: float) -> None:
    assert by_hand(*gaps) == seconds


@pytest.mark.parametrize("every", [100.0, 200.0, 1000.0])
def test_many_trainings_take_what_the_model_says(every: float) -> None:
    """The mean of 2000 trainings, within 4 standard errors. The intervals divide the work."""
    random = numpy.random.default_rng(3)
    totals = numpy.array([simulate_failures(FAILING, every, random) for _ in range(2000)])
    # The model, by adding up: an interval succeeds at once, or fails and must succeed together with a restart.
    rate, length = 1 / 1000, every + 20
    fails = -math.expm1(-rate * length)
    interval = fails / rate + fails * math.expm1(rate * (length + 50)) / rate
    expected = interval * 20_000 / every
    assert expected_seconds(FAILING, every) == pytest.approx(expected, rel=1e-12)
    error = 4 * totals.std() / len(totals) ** 0.5
    assert error < 0.05 * expected
    assert abs(totals.mean() - expected) < error


def test_the_best_interval() -> None:
    """Young's is sqrt(2 x 20 x 1000) = 200; Daly's is closer to the lowest expected time, found by trying."""
    assert young_seconds(FAILING) == 200
    assert daly_seconds(FAILING) == pytest.approx(200 * (1 + 0.1 / 3 + 0.01 / 9) - 20, rel=1e-12)
    best = min(numpy.arange(50.0, 500.0, 0.5), key=lambda every: expected_seconds(FAILING, every))
    assert abs(daly_seconds(FAILING) - best) < 1
    assert abs(young_seconds(FAILING) - best) > 10
    assert daly_seconds(replace(FAILING, save_seconds=2000)) == 1000


def test_the_table() -> None:
    report = saves_report(FAILING, [400, 50, 187, 187], 300)
    assert [row["every_seconds"] for row in report.rows] == [50, 187, 400]
    for row in report.rows:
        assert row["lowest_seconds"] < row["total_seconds"] < row["highest_seconds"]
        assert row["useful_share"] == 20_000 / row["total_seconds"]
        assert row["total_seconds"] == pytest.approx(row["expected_seconds"], rel=0.05)
    assert report.answers == [
        "a failure every 1000 s on average",
        "fastest of these: save every 187 s",
        "Young: every 200 s; Daly: every 187 s",
    ]
    around = saves_report(FAILING, None, 1)
    assert [row["every_seconds"] for row in around.rows] == [
        factor * daly_seconds(FAILING) for factor in (0.25, 0.5, 1, 2, 4)
    ]


def test_a_training_that_would_hardly_end() -> None:
    with pytest.raises(ConfigError, match=r"saves every 2.78 h would take more than 100 times its work\. Save more"):
        saves_report(FAILING, [100, 10_000], 10)
    with pytest.raises(ConfigError, match="more than 100 times"):
        saves_report(FAILING, [1e300], 1)
    with pytest.raises(ConfigError, match=r"saves every 100 ms would take more than 100 times its work\. Save less"):
        saves_report(FAILING, [0.1, 100], 1)


def test_intervals_around_dalys_of_a_training_that_fails_often() -> None:
    """Those with which it would not end are left out. If Daly's is one of them, no interval helps."""
    often = replace(FAILING, save_seconds=800.0, restart_seconds=2000.0)
    ends = [
        every for every in (factor * daly_seconds(often) for factor in (0.25, 0.5, 1, 2, 4))
        if expected_seconds(often, every) <= 100 * often.work_seconds
    ]  # fmt: skip
    assert daly_seconds(often) in ends
    assert len(ends) < 5
    assert [row["every_seconds"] for row in saves_report(often, None, 1).rows] == ends
    never = replace(FAILING, save_seconds=10_000.0)
    for intervals in (None, [100.0]):
        with pytest.raises(ConfigError, match=r"times its work\. Take shorter saves and restarts, or fewer nodes$"):
            saves_report(never, intervals, 1)
