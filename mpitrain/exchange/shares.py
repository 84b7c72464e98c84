"""The share of a rank in a mean, and the product with it."""

from __future__ import annotations

import numpy

from mpitrain.arrays import Array, is_device_array
from mpitrain.cuda import kernels
from mpitrain.errors import DataError, everywhere
from mpitrain.world import World


def scale(flat: Array, share: float) -> None:
    """Multiply `flat`, of a floating dtype, by `share` in place; rounds only once, even for a short dtype."""
    if share == 0.0:
        flat.fill(0)  # no product, because 0 x NaN is NaN
    elif share != 1.0 and is_device_array(flat):
        kernels.scale(flat, share)
    elif share != 1.0:
        # A share rounded to 16 bits would have a larger error than a sum: multiply in float32 at least.
        dtype = flat.dtype if flat.itemsize > 2 else numpy.dtype(numpy.float32)
        numpy.multiply(flat, share, out=flat, casting="same_kind", dtype=dtype)


def share_of(world: World, weights: list[float]) -> tuple[float, float]:
    """Return this rank's part of a mean, and the sum of all ranks' weights, which are given by rank.

    Raises:
        DataError: a weight is negative or not finite, or all weights are 0; raised on every rank.
    """
    total = sum(weights)
    if min(weights) >= 0 and 0 < total < float("inf"):
        return weights[world.rank] / total, total
    problem = "the weight is 0 on every rank, so there is no mean"
    for rank, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            problem = f"{world.name(rank)} has weight {weight}; a weight is a number of samples, 0 or more"
            break
    else:
        if total > 0:
            problem = f"the weights of all ranks add up to {total}; a weight is a number of samples"
    raise everywhere(DataError(problem))
