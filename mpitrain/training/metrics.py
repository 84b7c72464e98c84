"""Metrics over a whole data set that count every sample exactly once, at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from mpitrain.errors import ConfigError, DataError
from mpitrain.shard import part_of
from mpitrain.tree import Tree, describe, leaves, num_samples, rebuild
from mpitrain.world import World

# Means over a batch's samples, by name.
Metrics = Mapping[str, float]


def evaluate(
    world: World, metrics: Callable[[Tree], Metrics], arrays: Tree, samples_at_once: int = 1000
) -> dict[str, float]:
    """Return the mean of each metric over all samples, in float64, the same on every rank. Collective.

    Each rank takes a contiguous part. No sample is padded or counted twice. A rank may have no samples.

    Args:
        metrics: returns the means over one batch of samples, by name.
        arrays: a tree of arrays with the samples along the first dimension, the same on every rank.
        samples_at_once: the number of samples that `metrics` gets in one call.

    Raises:
        MismatchError: the arrays of the ranks differ in form, shape or dtype.
        DataError: there are no samples, or the arrays differ in length.
        ConfigError: `samples_at_once` is below 1.
    """
    if samples_at_once < 1:
        raise ConfigError(f"{world.name()}: samples_at_once={samples_at_once}; it must be at least 1")
    world.agree("evaluate", describe(arrays))
    length = num_samples(arrays)
    if length == 0:
        raise DataError(f"{world.name()}: there are no samples to evaluate")
    part = part_of(length, world.rank, world.size)
    parts: list[tuple[int, Metrics]] = []
    for begin in range(part.start, part.stop, samples_at_once):
        end = min(begin + samples_at_once, part.stop)
        values = (leaf[begin:end] for _, leaf in leaves(arrays))
        parts.append((end - begin, dict(metrics(rebuild(arrays, values.__next__)))))
    values_of_all = [item for of_rank in world.allgather(parts) for item in of_rank]
    # fsum rounds once, so the sum does not depend on how the samples were shared out.
    return {
        name: math.fsum(count * float(values[name]) for count, values in values_of_all) / length
        for name in values_of_all[0][1]
    }
