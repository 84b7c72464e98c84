"""What a loop has computed of the samples of a batch, such as losses, as numbers."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from mpitrain.errors import DataError
from mpitrain.exchange.totals import exact_total
from mpitrain.torch.drawn import Share
from mpitrain.world import World


def numbers_of(values: Any) -> numpy.ndarray:
    """Return a number, a tensor or an array as float64 on the host."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return numpy.asarray(values, numpy.float64)


def number_of(world: World, value: Any) -> float:
    """Return a mean over samples. Raises DataError if it is not one number."""
    numbers = numbers_of(value)
    if numbers.size != 1:
        raise DataError(
            f"{world.name()}: mean(value) takes one number, the mean over this rank's samples; it was given the shape "
            f"{numbers.shape}"
        )
    return float(numbers.reshape(()))


def mean_of_virtual_ranks(world: World, share: Share, values: Any) -> float:
    """Return the mean over all samples of a batch, of which each virtual rank has a mean. Collective.

    Args:
        values: a list; the newest are those of this rank's virtual ranks with samples.

    Raises:
        DataError: it is no list, or a short one.
    """
    counts = [count for count in share.virtual if count]
    if not isinstance(values, list) or len(values) < len(counts):
        given = f"a list of {len(values)}" if isinstance(values, list) else f"a {type(values).__name__}"
        raise DataError(
            f"{world.name()}: with virtual ranks, mean(values) takes a list with the mean over each virtual batch; it "
            f"was given {given}, and this rank has {len(counts)} virtual batches. Append each loss to it"
        )
    means = [number_of(world, value) for value in values[len(values) - len(counts) :]]
    return exact_total(world, [count * mean for count, mean in zip(counts, means, strict=True)]) / share.total
