"""An Exchange turns a flat buffer into its weighted mean over ranks."""

from __future__ import annotations

from typing import Protocol

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import Handle
from mpitrain.arrays import Array
from mpitrain.errors import DataError
from mpitrain.world import World


class Exchange(Protocol):
    """What a GradientReducer needs of it."""

    def mean(self, flat: Array, share: float) -> Handle:
        """Begin to replace `flat` by the sum over ranks of share x flat; the same bits on every rank.

        Args:
            flat: as for Algorithm.start, of a floating dtype.
            share: this rank's weight divided by the sum of all ranks' weights. Where it is 0 the content of `flat`
                is not looked at.
        """
        ...

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """An uninitialised flat array that `mean` needs not copy."""
        ...


class PlainExchange:
    """Every element as it is, by an allreduce."""

    def __init__(self, world: World, algorithm: str | None = None) -> None:
        """`algorithm` is a name in ALGORITHMS; default: the world's setting."""
        self._algorithm = make_algorithm(world, algorithm)

    def mean(self, flat: Array, share: float) -> Handle:
        """See Exchange. The shares add up to 1, so no sum can overflow."""
        scale(flat, share)
        return self._algorithm.start(flat)

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Exchange."""
        return self._algorithm.allocate(count, dtype)


def scale(flat: Array, share: float) -> None:
    """Multiply `flat`, of a floating dtype, by `share` in place; rounds once, also where the dtype is a short one."""
    if share == 0.0:
        flat.fill(0)  # not multiplied: 0 x NaN is NaN
    elif share != 1.0:
        # A share rounded to 16 bits would be off by more than a sum is: multiply in float32 at least.
        dtype = flat.dtype if flat.itemsize > 2 else numpy.dtype(numpy.float32)
        numpy.multiply(flat, share, out=flat, casting="same_kind", dtype=dtype)


def share_of(world: World, weights: list[float]) -> tuple[float, float]:
    """This rank's part of a mean, and the sum of the weights of all ranks, given by rank.

    Raises:
        DataError: on every rank: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights)
    if min(weights) >= 0 and 0 < total < float("inf"):
        return weights[world.rank] / total, total
    problem = "the weight is 0 on every rank: there is nothing to take the mean of"
    for rank, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            problem = f"{world.name(rank)} has weight {weight}; a weight is a number of samples, 0 or more"
            break
    else:
        if total > 0:
            problem = f"the weights of all ranks add up to {total}; a weight is a number of samples"
    error = DataError(problem)
    error.known_everywhere = True
    raise error
