"""Each rank's part of a global batch: equal parts, parts in proportion to measured speeds, or whole virtual ranks.

Also the checks of the options that all data sources share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from mpitrain.errors import ConfigError, DataError, everywhere
from mpitrain.world.shard import Part, newest_part, part_in, part_of
from mpitrain.world.world import World


def check_counts(world: World, num_samples: int | None, global_batch: int, seed: int) -> None:
    """Raise unless every rank can have samples. Call this with the same values on all ranks.

    Args:
        num_samples: the number of samples; None: unknown.

    Raises:
        DataError: there are no samples, or fewer than ranks.
        ConfigError: the global batch is not an int, or leaves ranks without samples in every step; the seed is not an
            int of at least 0.
    """
    if num_samples == 0:
        raise DataError("the data set has no samples")
    if num_samples is not None and num_samples < world.size:
        raise DataError(
            f"the data set has {num_samples} samples for {world.size} ranks; start at most {num_samples} ranks"
        )
    if not _is_int(global_batch):
        raise ConfigError(f"global_batch={global_batch!r}; it must be an int")
    if global_batch < world.size:
        raise ConfigError(
            f"global_batch={global_batch} for {world.size} ranks; each rank needs a sample, so at least {world.size}"
        )
    if not _is_int(seed) or seed < 0:
        raise ConfigError(f"seed={seed!r}; it must be an int of at least 0")


def _is_int(value: object) -> bool:
    return isinstance(value, int | numpy.integer) and not isinstance(value, bool)


class Shares:
    """The parts of all ranks: contiguous, in rank order, equal (within one sample) until `measured` or `cut`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._speeds = [1.0] * world.size
        self._parts: dict[int, slice] = {}
        self._own: slice | None = None  # samples of this rank's virtual ranks in a whole batch

    def cut(self, global_batch: int, virtual_ranks: int) -> int:
        """Give each rank whole virtual ranks from now on. Return the number of samples of each.

        A virtual rank has the same places in every batch. So in a smaller batch, the last virtual ranks have fewer
        samples, or none.

        Raises:
            ConfigError: the batch has no such equal parts. Raised on every rank.
        """
        size, rest = divmod(global_batch, virtual_ranks)
        if rest:
            raise everywhere(
                ConfigError(
                    f"virtual_ranks={virtual_ranks} and a global batch of {global_batch} samples; "
                    "all virtual ranks have the same number of samples, so the batch must be a multiple of "
                    f"virtual_ranks. Take global_batch={global_batch - rest or virtual_ranks} or "
                    f"{global_batch - rest + virtual_ranks}"
                )
            )
        own = part_of(virtual_ranks, self._world.rank, self._world.size)
        self._own, self._parts = slice(own.start * size, own.stop * size), {}
        return size

    def measured(self, samples_per_second: float) -> None:
        """Make the parts proportional to the speeds from now on. Each rank passes its own speed. Collective.

        Raises:
            ConfigError: a speed is not a finite number above 0, or ranks have whole virtual ranks. Raised on every
                rank.
        """
        if self._own is not None:
            raise everywhere(
                ConfigError(
                    "samples cannot be divided by speed, because each rank has whole virtual ranks; leave out "
                    "mt.Balance or virtual_ranks"
                )
            )
        speeds = self._world.allgather(float(samples_per_second))
        for rank, speed in enumerate(speeds):
            if not (math.isfinite(speed) and speed > 0):
                raise everywhere(
                    ConfigError(f"{self._world.name(rank)} does {speed} samples/s; it must be finite and above 0")
                )
        self._speeds, self._parts = speeds, {}

    def part(self, length: int) -> slice:
        """Return this rank's part of a global batch of `length` samples."""
        if self._world.watch:
            return part_in(self._world, length)
        if length not in self._parts:
            if self._own is not None:
                self._parts[length] = slice(min(self._own.start, length), min(self._own.stop, length))
            else:
                counts = split(length, self._speeds)
                begin = sum(counts[: self._world.rank])
                self._parts[length] = slice(begin, begin + counts[self._world.rank])
        part = self._parts[length]
        newest_part[:] = [Part(part.stop - part.start, length)] if self._own is None else []
        return part


def split(length: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `length` samples each rank gets, so that the slowest rank ends as early as possible.

        64 samples, speeds 4 2 1:  36.57 18.29 9.14  ->  36 18 9  ->  37 18 9     (37/4 < 19/2 < 10/1)

    Each rank gets its proportion, rounded down. Then each remaining sample goes to the rank that would finish it first;
    in a tie, to the lower rank (D'Hondt's method of allocating seats). Equal speeds give `part_of`'s sizes. With enough
    samples, every rank has at least one. Otherwise its speed could not be measured again.
    """
    total = math.fsum(speeds)
    counts = [int(length * (speed / total)) for speed in speeds]
    while sum(counts) < length:
        counts[min(range(len(counts)), key=lambda rank: (counts[rank] + 1) / speeds[rank])] += 1
    while length >= len(counts) and 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts
