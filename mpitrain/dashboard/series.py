"""A curve for so many pixels: of each column of pixels the lowest and the highest point, so no peak is lost."""

from __future__ import annotations

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


def curve(steps: Floats, values: Floats, first: float, last: float, pixels: int) -> Curve:
    """Return the points with steps from `first` to `last`, and one before and one behind, where the line goes on.

    All points are returned if there are at most two for each pixel. Otherwise each column of pixels has its lowest and
    its highest point at their steps, and its first point that is not finite.

    Args:
        steps: ascending.
        values: one for each step.
        first, last: the range.
        pixels: the width of the range, at least 1.
    """
    begin, end = int(numpy.searchsorted(steps, first, "left")), int(numpy.searchsorted(steps, last, "right"))
    inner = values[begin:end]
    odd = numpy.flatnonzero(~numpy.isfinite(inner))
    first_odd = float(steps[begin + odd[0]]) if len(odd) else None
    is_exact = len(inner) <= 2 * pixels
    chosen = numpy.arange(len(inner)) if is_exact else _extremes(steps[begin:end], inner, pixels)
    edges = [place for place in (begin - 1, end) if 0 <= place < len(steps)]
    places = numpy.unique(numpy.concatenate([chosen + begin, numpy.array(edges, int)]))
    return Curve(steps[places], values[places], is_exact, len(inner), len(odd), first_odd)


def _extremes(steps: Floats, values: Floats, pixels: int) -> NDArray[numpy.int64]:
    """Return the places of the lowest, the highest and the first odd point of each column, and of both ends."""
    columns = ((steps - steps[0]) * (pixels / (steps[-1] - steps[0]))).astype(numpy.int64)
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
    return numpy.concatenate(chosen)


def _first_of_each(places: NDArray[numpy.int64], starts: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return the first place at or behind each start; every column has one."""
    return places[numpy.searchsorted(places, starts)]
