"""A curve for a given width in pixels: the lowest and the highest point of each column, so no peak is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]


@dataclass(frozen=True)
class Curve:
    """Points of a metric, in the order of their steps.

    Attributes:
        steps, values: the points.
        is_exact: no point of the range was left out.
        num_points: the number of points in the range.
        num_not_finite: how many of them are NaN or infinite.
        first_not_finite: the step of the first of these; None: there is none.
    """

    steps: Floats
    values: Floats
    is_exact: bool
    num_points: int
    num_not_finite: int
    first_not_finite: float | None


def curve(pieces: Callable[[], Iterable[tuple[Floats, Floats]]], first: float, last: float, pixels: int) -> Curve:
    """Return the points with steps from `first` to `last`, and one before and one after, where the line continues.

    All points are returned if there are at most two for each pixel. Otherwise each column of pixels has its lowest and
    its highest point at their steps, and its first point that is not finite. Memory is taken for one piece at a time.

    Args:
        pieces: called twice; iterates over the points as ascending steps and a value for each.
        first, last: the range.
        pixels: the width of the range, at least 1.
    """
    before: Floats = numpy.empty((2, 0))
    behind = before
    ends: list[float] = []  # of the points in the range
    count = num_odd = 0
    first_odd = None
    for steps, values in pieces():
        begin, end = _range(steps, first, last)
        if begin:
            before = numpy.array([steps[begin - 1 : begin], values[begin - 1 : begin]])
        if end < len(steps) and not behind.size:
            behind = numpy.array([steps[end : end + 1], values[end : end + 1]])
        if begin == end:
            continue
        odd = numpy.flatnonzero(~numpy.isfinite(values[begin:end]))
        if len(odd) and first_odd is None:
            first_odd = float(steps[begin + odd[0]])
        num_odd += len(odd)
        count += end - begin
        ends = [*ends[:1], float(steps[begin]), float(steps[end - 1])]
    is_exact = count <= 2 * pixels
    chosen = [before]
    for steps, values in pieces() if count else ():
        begin, end = _range(steps, first, last)
        if begin == end:
            continue
        points = numpy.stack([steps[begin:end], values[begin:end]])
        chosen.append(points if is_exact else _extremes(points, ends[0], ends[-1], pixels))
    if not is_exact:
        chosen = [before, _extremes(numpy.concatenate(chosen[1:], axis=1), ends[0], ends[-1], pixels)]
    steps, values = numpy.concatenate([*chosen, behind], axis=1)
    return Curve(steps, values, is_exact, count, num_odd, first_odd)


def means(pieces: Callable[[], Iterable[tuple[Floats, Floats]]], first: float, last: float, columns: int) -> Curve:
    """Return the means of the finite points with steps from `first` to `last`, in columns of one width.

    Each mean is at the mean of its points' steps. The arguments are those of `curve`.
    """
    ranges = [(steps[slice(*_range(steps, first, last))][[0, -1]]) for steps, _ in pieces() if _has(steps, first, last)]
    sums = numpy.zeros((3, columns))  # of steps, values and points
    low, high = (ranges[0][0], ranges[-1][1]) if ranges else (0.0, 0.0)
    for steps, values in pieces() if ranges else ():
        begin, end = _range(steps, first, last)
        is_finite = numpy.isfinite(values[begin:end])
        kept = numpy.stack([steps[begin:end], values[begin:end], numpy.ones(end - begin)])[:, is_finite]
        places = numpy.minimum((kept[0] - low) * (columns / max(high - low, 1e-9)), columns - 1).astype(numpy.int64)
        sums += [numpy.bincount(places, of_points, columns) for of_points in kept]
    steps, values, counts = sums[:, sums[2] > 0]
    return Curve(steps / counts, values / counts, False, int(counts.sum()), 0, None)


def _has(steps: Floats, first: float, last: float) -> bool:
    begin, end = _range(steps, first, last)
    return end > begin


def _range(steps: Floats, first: float, last: float) -> tuple[int, int]:
    return int(numpy.searchsorted(steps, first, "left")), int(numpy.searchsorted(steps, last, "right"))


def _extremes(points: Floats, low: float, high: float, pixels: int) -> Floats:
    """Return of each column the lowest, the highest and the first odd point, and both ends.

    Args:
        points: steps and values.
        low, high: the steps at both ends of all columns.
    """
    steps, values = points
    if not len(steps):
        return points
    columns = ((steps - low) * (pixels / (high - low))).astype(numpy.int64)
    starts = numpy.flatnonzero(numpy.diff(columns, prepend=-1))
    counts = numpy.diff(starts, append=len(values))
    is_odd = ~numpy.isfinite(values)
    chosen = [starts[:1], numpy.array([len(values) - 1])]
    for ufunc, worst in ((numpy.minimum, numpy.inf), (numpy.maximum, -numpy.inf)):
        comparable = numpy.where(is_odd, worst, values)
        best = numpy.repeat(ufunc.reduceat(comparable, starts), counts)
        chosen.append(_first_of_each(numpy.flatnonzero(comparable == best), starts))
    odd = numpy.flatnonzero(is_odd)
    if len(odd):
        columns_of_odd = numpy.searchsorted(starts, odd, "right")
        chosen.append(odd[numpy.flatnonzero(numpy.diff(columns_of_odd, prepend=-1))])
    return points[:, numpy.unique(numpy.concatenate(chosen))]


def _first_of_each(places: NDArray[numpy.int64], starts: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return the first place at or after each start; every column has one."""
    return places[numpy.searchsorted(places, starts)]
