"""Arrays in memory, or in files that are mapped into it."""

from __future__ import annotations

from mpitrain.training.data.indexed import IndexedData
from mpitrain.training.data.samples import Arrays, Augment
from mpitrain.tree import Tree, describe, num_samples
from mpitrain.world import World


class ArrayData(IndexedData):
    """Global batches of arrays, and this rank's part of each.

    An epoch visits every sample exactly once, in an order drawn from (seed, epoch). Its last batch may be smaller;
    ranks then have unequal parts, which the weighted mean makes exact.
    """

    def __init__(
        self,
        world: World,
        arrays: Tree,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
    ) -> None:
        """Collective. Give the same arrays on every rank: the ranks compare their shapes and these options.

        Args:
            arrays: a tree of host arrays with the samples along the first dimension. Those of
                `numpy.load(path, mmap_mode="r")` stay on the disk; only the samples of a batch are read.
            global_batch: the number of samples of all ranks together in one step.
            seed: for the order of samples and for `augment`, at least 0.
            shuffle: draw a new order every epoch. False: keep the order of the arrays.
            augment: is called with a copy of each sample and with a `numpy.random.Generator` that depends only on
                seed, epoch and sample. Returns the sample to use.

        Raises:
            MismatchError: the arrays of the ranks differ in form, shape or dtype, or the options differ.
            DataError: the arrays differ in length, or there are fewer samples than ranks. Raised on every rank.
            ConfigError: the global batch is not an int, or leaves ranks without samples in every step, or the seed is
                below 0. Raised on every rank.
        """
        options = f"global_batch={global_batch} seed={seed} shuffle={shuffle}"
        world.agree("compare the data sets", [options, *describe(arrays)])
        with world.together("look at the data set"):
            count = num_samples(arrays)
            super().__init__(world, Arrays(arrays), count, global_batch, seed, shuffle, augment)
