"""The share of a rank in a mean, and the product with it; sums of a few numbers that are rounded once.

Such sums do not depend on which rank has which number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy

from mpitrain.arrays import Array, is_device_array
from mpitrain.cuda import kernels
from mpitrain.errors import DataError, everywhere
from mpitrain.world.world import World

# The weight of a part in which nothing counts, for example a part without tokens. It counts only if no rank has
# anything that counts. Then a loss of 0 stays 0, and a mean over nothing stays NaN, as in one process.
NOTHING = 2.0**-1000
_LEAST = 2.0**-900


def scale(flat: Array, share: float) -> None:
    """Multiply `flat`, of a floating dtype, by `share` in place; round only once, even for a 16-bit dtype."""
    if share == 0.0:
        flat.fill(0)  # no product, because 0 x NaN is NaN
    elif share != 1.0 and is_device_array(flat):
        kernels.scale(flat, share)
    elif share != 1.0:
        # A share rounded to 16 bits would have a larger error than a sum: multiply in float32 at least.
        dtype = flat.dtype if flat.itemsize > 2 else numpy.dtype(numpy.float32)
        numpy.multiply(flat, share, out=flat, casting="same_kind", dtype=dtype)


def share_of(world: World, weights: list[float]) -> tuple[float, float]:
    """Return this rank's part of a mean, and the sum of all ranks' weights, which are given by rank. See NOTHING.

    Raises:
        DataError: a weight is negative or not finite, or all weights are 0; raised on every rank.
    """
    if max(weights) > _LEAST:
        weights = [0.0 if 0 < weight < _LEAST else weight for weight in weights]
    total = sum(weights)
    if min(weights) >= 0 and 0 < total < float("inf"):
        return weights[world.rank] / total, total
    kind = "number of samples, or of other counted items"
    problem = "the weight is 0 on every rank, so there is no mean"
    for rank, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            problem = f"{world.name(rank)} has weight {weight}; a weight is a {kind}, 0 or more"
            break
    else:
        if total > 0:
            problem = f"the weights of all ranks add up to {total}; a weight is a {kind}"
    raise everywhere(DataError(problem))


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
    """Return a few numbers with exactly the same sum: the rounded sum, its rounding error, and so on."""
    if not all(map(math.isfinite, values)):
        return [rounded_sum(values)]
    few: list[float] = []
    try:
        while rest := math.fsum([*values, *(-one for one in few)]):
            few.append(rest)
    except OverflowError:
        return list(values)
    return few
