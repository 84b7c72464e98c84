"""Batches for all ranks from one global cursor: the same samples in the same steps at any world size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.tree import Tree, describe, leaves, num_samples, rebuild
from mpitrain.world import World, part_of


class ArrayData:
    """Global batches of arrays in memory, and this rank's part of each.

    An epoch visits every sample exactly once, in an order drawn from (seed, epoch). Its last batch may be smaller;
    ranks then have unequal parts, which the weighted mean makes exact.
    """

    def __init__(self, world: World, arrays: Tree, *, global_batch: int, seed: int = 0, shuffle: bool = True) -> None:
        """Every rank calls it with the same arrays. Collective: the ranks compare their shapes and these options.

        Args:
            arrays: a tree of host arrays with the samples along the first dimension.
            global_batch: samples of all ranks together in one step.
            seed: of the order of samples.
            shuffle: draw a new order every epoch, or keep the arrays' own.

        Raises:
            MismatchError: the ranks' arrays differ in form, shape or dtype, or the options do.
            DataError: arrays of unequal lengths, no samples, or fewer samples than ranks. On every rank.
            ConfigError: a global batch that is no int or leaves ranks without samples in every step. On every rank.
        """
        options = f"global_batch={global_batch} seed={seed} shuffle={shuffle}"
        world.agree("compare the data sets", [options, *describe(arrays)])
        with world.together("look at the data set"):
            self.num_samples = num_samples(arrays)
            if self.num_samples == 0:
                raise DataError("the data set has no samples")
            if self.num_samples < world.size:
                raise DataError(
                    f"the data set has {self.num_samples} samples for {world.size} ranks; "
                    f"start at most {self.num_samples} ranks"
                )
            if not isinstance(global_batch, int | numpy.integer) or isinstance(global_batch, bool):
                raise ConfigError(f"global_batch={global_batch!r}; it must be an int")
            if global_batch < world.size:
                raise ConfigError(
                    f"global_batch={global_batch} for {world.size} ranks; "
                    f"each rank needs a sample, so at least {world.size}"
                )
        self.global_batch = min(int(global_batch), self.num_samples)
        self.epoch = 0
        self.cursor = 0  # samples of this epoch that all ranks together have used
        self._world = world
        self._arrays = arrays
        self._leaves = [leaf for _, leaf in leaves(arrays)]
        self._seed = seed
        self._shuffle = shuffle
        self._order_of = -1  # the epoch that self._order is for

    @property
    def steps_per_epoch(self) -> int:
        """How many global batches an epoch has; the last one may be smaller."""
        return -(-self.num_samples // self.global_batch)

    def __iter__(self) -> Iterator[tuple[Tree, int]]:
        return self

    def __next__(self) -> tuple[Tree, int]:
        """This rank's part of the next global batch, and its number of samples (0 where there are too few)."""
        if self.cursor == self.num_samples:
            self.epoch, self.cursor = self.epoch + 1, 0
        if self._order_of != self.epoch:
            self._order = numpy.arange(self.num_samples)
            if self._shuffle:
                numpy.random.default_rng((self._seed, self.epoch)).shuffle(self._order)
            self._order_of = self.epoch
        end = min(self.cursor + self.global_batch, self.num_samples)
        chosen = self._order[self.cursor : end]
        mine = chosen[part_of(len(chosen), self._world.rank, self._world.size)]
        self.cursor = end
        values = (leaf[mine] for leaf in self._leaves)
        return rebuild(self._arrays, values.__next__), len(mine)

    def state(self) -> dict[str, Any]:
        """Where the data stands, the same on every rank and for any world size."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_samples": self.num_samples,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: it was taken with another data set or order of samples, or is out of range.
        """
        for key, mine in (("num_samples", self.num_samples), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise CheckpointError(f"the checkpoint's data has {key}={state[key]}, this run's {mine}")
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        if epoch < 0 or not 0 <= cursor <= self.num_samples:
            raise CheckpointError(
                f"the checkpoint's data stands at epoch={epoch} cursor={cursor}; "
                f"epochs begin at 0, and the cursor is 0 to {self.num_samples}"
            )
        self.epoch, self.cursor = epoch, cursor
