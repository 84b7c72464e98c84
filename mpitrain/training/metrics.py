"""Metrics over a whole data set that count every sample exactly once, at any world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy

from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, DataError
from mpitrain.exchange.totals import rounded_sum
from mpitrain.exchange.trees import aligned_copy
from mpitrain.shard import part_of
from mpitrain.tree import Tree, describe, leaves, num_samples, rebuild
from mpitrain.world import World

# Means over a batch's samples, by name.
Metrics = Mapping[str, float]


def evaluate(
    world: World,
    metrics: Callable[[Tree], Metrics],
    arrays: Tree,
    samples_at_once: int = 1000,
    virtual_ranks: int | None = None,
) -> dict[str, float]:
    """Return the mean of each metric over all samples, in float64, the same on every rank. Collective.

    Each rank takes a contiguous part. No sample is padded or counted twice. A rank may have no samples.

    The sum over all calls of `metrics` is rounded once. But the batches depend on the number of ranks, and kernels may
    round otherwise for batches of another size. With `virtual_ranks`, the batches are the same on any number of ranks,
    and so is the result, if each rank has the same number of threads.

    Args:
        metrics: returns the means over one batch of samples, by name.
        arrays: a tree of arrays with the samples along the first dimension, the same on every rank.
        samples_at_once: the largest number of samples that `metrics` gets in one call.
        virtual_ranks: cut the samples into so many parts, and divide the parts among the ranks. Each call of `metrics`
            then gets samples of one part, in new memory on the host. With fewer parts than ranks, some ranks wait.

    Raises:
        MismatchError: the arrays of the ranks differ in form, shape or dtype.
        DataError: there are no samples, or the arrays differ in length.
        ConfigError: `samples_at_once` or `virtual_ranks` is below 1.
    """
    for name, value in (("samples_at_once", samples_at_once), ("virtual_ranks", virtual_ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{world.name()}: {name}={value}; it must be at least 1")
    world.agree("evaluate", [*describe(arrays), f"virtual_ranks={virtual_ranks}"])
    length = num_samples(arrays)
    if length == 0:
        raise DataError(f"{world.name()}: there are no samples to evaluate")
    if virtual_ranks is None:
        own = [part_of(length, world.rank, world.size)]
    else:
        numbers = part_of(virtual_ranks, world.rank, world.size)
        own = [part_of(length, number, virtual_ranks) for number in range(numbers.start, numbers.stop)]
    parts: list[tuple[int, Metrics]] = []
    for part in own:
        for begin in range(part.start, part.stop, samples_at_once):
            samples = slice(begin, min(begin + samples_at_once, part.stop))
            batch = _samples(arrays, samples, is_copied=virtual_ranks is not None)
            parts.append((samples.stop - samples.start, dict(metrics(batch))))
    values_of_all = [item for of_rank in world.allgather(parts) for item in of_rank]
    # It is rounded once, so it does not depend on how the samples were shared out.
    return {
        name: rounded_sum([count * float(values[name]) for count, values in values_of_all]) / length
        for name in values_of_all[0][1]
    }


def _samples(arrays: Tree, samples: slice, *, is_copied: bool) -> Tree:
    """Return these samples. A copy on the host begins at the same place of a cache line on any rank."""
    values = (leaf[samples] for _, leaf in leaves(arrays))

    def one() -> Array:
        value = next(values)
        return aligned_copy(value) if is_copied and isinstance(value, numpy.ndarray) else value

    return rebuild(arrays, one)
