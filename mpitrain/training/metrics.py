"""Metrics over a whole data set that count every sample exactly once, at any world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy

from mpitrain.arrays import Array
from mpitrain.collectives.shares import rounded_sum
from mpitrain.collectives.trees import aligned_copy
from mpitrain.errors import ConfigError, DataError, everywhere
from mpitrain.tree import Tree, describe, leaves, num_samples, plain_leaves, rebuild
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

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
    round differently for batches of another size. With `virtual_ranks`, the batches are the same on any number of
    ranks, and so is the result, if each rank has the same number of threads.

    Args:
        metrics: returns the means over one batch of samples, by name.
        arrays: a tree of arrays with the samples along the first dimension, the same on every rank.
        samples_at_once: the largest number of samples that `metrics` gets in one call.
        virtual_ranks: cut the samples into this many parts, and divide the parts among the ranks. Each call of
            `metrics` then gets samples of one part, in new CPU memory. With fewer parts than ranks, some ranks wait.

    Raises:
        MismatchError: the arrays of the ranks differ in form, shape or dtype.
        DataError: there are no samples, the arrays differ in length, or a metric is not a number.
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
            values = dict(metrics(batch))
            if wrong := [name for name, value in values.items() if not is_number(value)]:
                raise DataError(
                    f"{world.name()}: the metric {wrong[0]!r} of a batch is {values[wrong[0]]!r:.80}; allowed is a "
                    "number, such as the mean over its samples"
                )
            parts.append((samples.stop - samples.start, values))
    return mean_of_all(world, parts)


def mean_of_all(world: World, parts: Sequence[tuple[int, Metrics]]) -> dict[str, float]:
    """Return the mean of each metric over the samples of all ranks, in float64, the same on every rank. Collective.

    Args:
        parts: the number of samples of each batch of this rank, at least 1, and the means over them. It may be empty
            on some ranks.

    Raises:
        DataError: no rank has samples. Raised on every rank.
    """
    values_of_all = [item for of_rank in world.allgather(list(parts)) for item in of_rank]
    if not values_of_all:
        raise everywhere(DataError("there are no samples to evaluate; give data that has at least one batch"))
    total = sum(count for count, _ in values_of_all)
    # It is rounded once, so it does not depend on how the samples were divided.
    return {
        name: rounded_sum([count * float(values[name]) for count, values in values_of_all]) / total
        for name in values_of_all[0][1]
    }


def is_name(name: object) -> bool:
    """Whether this name is allowed for a metric: rows, curves and terminals must be able to show it."""
    return isinstance(name, str) and bool(name.strip()) and name.isprintable()


def is_number(value: object) -> bool:
    """Whether this value is allowed for a metric: a number, or an array or tensor with one element."""
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)  # type: ignore[arg-type] # that is the question
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def _samples(arrays: Tree, samples: slice, *, is_copied: bool) -> Tree:
    """Return these samples. A CPU copy begins at the same place of a cache line on any rank."""
    values = (leaf[samples] for _, leaf in (plain_leaves if is_copied else leaves)(arrays))

    def one() -> Array:
        value = next(values)
        return aligned_copy(value) if is_copied and isinstance(value, numpy.ndarray) else value

    return rebuild(arrays, one)
