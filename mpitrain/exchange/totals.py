"""Sums of a few numbers of all ranks that are rounded once, so that they do not depend on who has which number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpitrain.world import World


def exact_total(world: World, values: Sequence[float]) -> float:
    """Return the sum of these numbers of all ranks, correctly rounded. Collective. The ranks may have different counts.

    Infinities of both signs, and sums beyond the range of float64, are added up in the order of the ranks.
    """
    of_all = [value for of_rank in world.allgather(_summands(values)) for value in of_rank]
    try:
        return math.fsum(of_all)
    except (ValueError, OverflowError):
        return float(sum(of_all))


def _summands(values: Sequence[float]) -> list[float]:
    """Return a few numbers with exactly the same sum: the rounded sum, and what rounding has left of it, and so on."""
    few: list[float] = []
    try:
        while rest := math.fsum([*values, *(-one for one in few)]):
            few.append(rest)
            if not math.isfinite(rest):
                return few
    except (ValueError, OverflowError):
        return list(values)
    return few
