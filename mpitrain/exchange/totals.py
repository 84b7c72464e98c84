"""Sums of a few numbers of all ranks that are rounded once, so that they do not depend on who has which number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from mpitrain.world import World


def exact_total(world: World, values: Sequence[float]) -> float:
    """Return the `rounded_sum` of these numbers of all ranks. Collective. The ranks may have different counts."""
    return rounded_sum([value for of_rank in world.allgather(_summands(values)) for value in of_rank])


def rounded_sum(values: Sequence[float]) -> float:
    """Return the correctly rounded sum. No order of the numbers changes it.

    NaN, or infinities of both signs, give NaN. Otherwise, one infinity gives that infinity. A sum beyond the range of
    float64 is infinite, but a partial sum never overflows.
    """
    if special := [value for value in values if not math.isfinite(value)]:
        return float(sum(special))
    try:
        return math.fsum(values)
    except OverflowError:  # of the sum, or only of a partial sum
        total = sum(Fraction(float(value)) for value in values)
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _summands(values: Sequence[float]) -> list[float]:
    """Return a few numbers with exactly the same sum: the rounded sum, and what rounding has left of it, and so on."""
    if not all(map(math.isfinite, values)):
        return [rounded_sum(values)]
    few: list[float] = []
    try:
        while rest := math.fsum([*values, *(-one for one in few)]):
            few.append(rest)
    except OverflowError:
        return list(values)
    return few
