"""A curve for so many pixels has the lowest and the highest point of every column."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator

import numpy
import pytest

from mpitrain.dashboard.series import Curve, curve


def curve_of(steps: numpy.ndarray, values: numpy.ndarray, first: float, last: float, pixels: int) -> Curve:
    """The curve of points in pieces, which must not depend on the pieces."""
    curves = []
    for size in (max(1, len(steps)), 64, 7):
        pieces = [(steps[i : i + size], values[i : i + size]) for i in range(0, len(steps), size)]
        curves.append(curve(lambda pieces=pieces: pieces, first, last, pixels))  # type: ignore[misc]
    for other in curves[1:]:
        assert (other.steps.tolist(), str(other.values.tolist())) == (
            curves[0].steps.tolist(),
            str(curves[0].values.tolist()),
        )
        assert (other.num_points, other.is_exact) == (curves[0].num_points, curves[0].is_exact)
        assert (other.num_not_finite, other.first_not_finite) == (curves[0].num_not_finite, curves[0].first_not_finite)
    return curves[0]


def test_memory_is_taken_for_a_piece_at_a_time() -> None:
    """A page asks for its curves again and again, and a long run has a million rows: 16 MB of each metric."""

    def pieces() -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
        for number in range(100):
            steps = numpy.arange(4096.0) + 4096 * number
            yield steps, numpy.sqrt(steps)

    tracemalloc.start()
    try:
        shown = curve(pieces, -math.inf, math.inf, 500)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # all points have 6.5 MB
    finally:
        tracemalloc.stop()
    assert shown.num_points == 409_600


def columns_of(steps: numpy.ndarray, first: float, last: float, pixels: int) -> list[int]:
    """The column of each step in exact integer arithmetic; steps are whole numbers here."""
    low, high = int(first), int(last)
    return [(int(step) - low) * pixels // (high - low) for step in steps]


@pytest.mark.parametrize("pixels", [1, 7, 100])
@pytest.mark.parametrize("odd", [0, 1, 50])
def test_extremes_are_exact(pixels: int, odd: int) -> None:
    rng = numpy.random.default_rng(pixels + odd)
    steps = numpy.cumsum(rng.integers(1, 5, 3000)).astype(float)
    values = rng.standard_normal(3000)
    values[rng.choice(3000, odd, replace=False)] = rng.choice([math.nan, math.inf, -math.inf], odd)
    shown = curve_of(steps, values, -math.inf, math.inf, pixels)
    assert not shown.is_exact
    assert (shown.num_points, shown.num_not_finite) == (3000, odd)
    odd_steps = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    assert shown.first_not_finite == (odd_steps[0] if odd_steps else None)
    assert len(shown.steps) <= 3 * (pixels + 1) + 2
    assert (numpy.diff(shown.steps) > 0).all()
    assert (shown.steps[0], shown.steps[-1]) == (steps[0], steps[-1])
    of_step = dict(zip(steps, values, strict=True))
    for step, value in zip(shown.steps, shown.values, strict=True):
        assert value == of_step[step] or (math.isnan(value) and math.isnan(of_step[step]))
    expected: dict[int, list[float]] = {}
    columns = columns_of(steps, steps[0], steps[-1], pixels)
    for column, value in zip(columns, values, strict=True):
        expected.setdefault(column, []).append(value)
    found: dict[int, list[float]] = {}
    for column, value in zip(columns_of(shown.steps, steps[0], steps[-1], pixels), shown.values, strict=True):
        found.setdefault(column, []).append(value)
    assert found.keys() == expected.keys()
    for column, all_values in expected.items():
        finite, shown_finite = ([v for v in some if math.isfinite(v)] for some in (all_values, found[column]))
        assert (min(shown_finite, default=None), max(shown_finite, default=None)) == (
            min(finite, default=None),
            max(finite, default=None),
        )
        assert any(not math.isfinite(v) for v in found[column]) == any(not math.isfinite(v) for v in all_values)


@pytest.mark.parametrize(
    ("first", "last"), [(-5, 2000), (100, 150), (100, 100), (101.5, 101.7), (990, 5000), (5000, 6000)]
)
def test_a_zoom_is_exact_and_the_line_goes_on(first: float, last: float) -> None:
    steps, values = numpy.arange(1.0, 1001.0), numpy.sqrt(numpy.arange(1.0, 1001.0))
    shown = curve_of(steps, values, first, last, 600)
    inside = [step for step in range(1, 1001) if first <= step <= last]
    before = [max((step for step in range(1, 1001) if step < first), default=0)]
    behind = [min((step for step in range(1, 1001) if step > last), default=0)]
    assert shown.is_exact
    assert shown.num_points == len(inside)
    assert shown.steps.tolist() == [step for step in (*before, *inside, *behind) if step]
    assert shown.values.tolist() == [math.sqrt(step) for step in shown.steps]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_points(count: int) -> None:
    steps = numpy.arange(1.0, count + 1.0)
    shown = curve_of(steps, steps, -math.inf, math.inf, 1)
    assert (shown.steps.tolist(), shown.is_exact, shown.first_not_finite) == (steps.tolist(), True, None)
