"""Global batches of numbered samples, in an order drawn from (seed, epoch).

ArrayData takes samples from arrays, MapData from anything with a length: files, a database, another library's data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from mpitrain.data.order import Order
from mpitrain.data.samples import Arrays, Augment, Batches, Items, Source, augmented
from mpitrain.data.shares import Shares, check_counts
from mpitrain.errors import CheckpointError
from mpitrain.tree import Tree, describe, leaves, num_samples, rebuild
from mpitrain.world.world import World


class IndexedData:
    """The common part of ArrayData and MapData: cursor, order, this rank's part.

    An epoch visits every sample exactly once, in an order drawn from (seed, epoch). Its last batch may be smaller;
    ranks then have unequal parts, which the weighted mean makes exact.
    """

    def __init__(
        self,
        world: World,
        source: Source,
        num_samples: int,
        global_batch: int,
        seed: int,
        shuffle: bool,
        augment: Augment | None,
    ) -> None:
        """All ranks call this, but it exchanges nothing. Raises the errors of `check_counts`."""
        check_counts(world, num_samples, global_batch, seed)
        self.num_samples = num_samples
        self.global_batch = min(int(global_batch), num_samples)
        self.epoch = 0
        self.cursor = 0  # samples of this epoch that all ranks together have used
        self._left: list[tuple[int, int, int]] = []  # places before the cursor that are not used: epoch, begin, end
        self._shares = Shares(world)
        self._source = source
        self._seed = int(seed)
        self._shuffle = bool(shuffle)
        self._augment = augment
        self._order = Order(num_samples, seed=self._seed, shuffle=self._shuffle)

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches of an epoch. The last batch may be smaller."""
        return -(-self.num_samples // self.global_batch)

    def __iter__(self) -> Iterator[tuple[Tree, int]]:
        return self

    def __next__(self) -> tuple[Tree, int]:
        """Return this rank's part of the next global batch, and its number of samples (0 if there are too few).

        After a resume, samples that servers had handed out and that no update has used come first, as smaller batches
        of their own.
        """
        if self._left:
            epoch, begin, last = self._left[0]
        else:
            epoch, begin = (self.epoch, self.cursor) if self.cursor < self.num_samples else (self.epoch + 1, 0)
            last = self.num_samples
        end = min(begin + self.global_batch, last)
        part = self._shares.part(end - begin)
        count = part.stop - part.start
        if count:
            batch = self.read(epoch, begin + part.start, begin + part.stop)
        else:  # another rank's sample, only for its form, shapes and dtypes
            batch = self.read(epoch, begin, begin + 1)
            values = (leaf[:0] for _, leaf in leaves(batch))
            batch = rebuild(batch, values.__next__)
        # Last: if reading fails, the position is unchanged.
        if self._left:
            self._left[:1] = [(epoch, end, last)] if end < last else []
        else:
            self.epoch, self.cursor = epoch, end
        return batch, count

    def read(self, epoch: int, begin: int, end: int) -> Tree:
        """Return the samples at the places `begin` to `end` (exclusive) of an epoch's order. Not collective.

        The position in the data does not change. One rank may read places that no other rank reads.
        """
        numbers = self._order.samples(epoch, begin, end)
        if self._augment is None:
            return self._source.batch(numbers)
        return augmented(self._augment, self._source.each(numbers), numbers.tolist(), self._seed, epoch)

    def share_out(self, samples_per_second: float) -> None:
        """From the next batch on, divide batches among ranks in proportion to their speeds, in samples/s. Collective.

        The samples of each step stay the same, and so does their mean. No checkpoint holds the speeds.

        Raises:
            ConfigError: a speed is not a finite number above 0. Raised on every rank.
        """
        self._shares.measured(samples_per_second)

    def cut(self, virtual_ranks: int) -> int:
        """Give each rank whole virtual ranks of the batches from now on. Return the number of samples of each.

        All ranks call this with the same number, before the first batch. See mpitrain/strategies/virtual_ranks.py.

        Raises:
            ConfigError: the global batch is not a multiple of it. Raised on every rank.
        """
        return self._shares.cut(self.global_batch, virtual_ranks)

    def state(self) -> dict[str, Any]:
        """Return the position in the data. The state is the same on every rank and for any world size.

        The entry `left`, if there is one, has the places before the cursor that no update has used: lists of epoch,
        begin and end.
        """
        state = {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_samples": self.num_samples,
        }
        return {**state, "left": [list(places) for places in self._left]} if self._left else state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the state belongs to another data set or order of samples, or is out of range.
        """
        for key, value in (("num_samples", self.num_samples), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != value:
                raise CheckpointError(f"the checkpoint's data has {key}={state[key]}, this run's {value}")
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        if epoch < 0 or not 0 <= cursor <= self.num_samples:
            raise CheckpointError(
                f"the checkpoint's data is at epoch={epoch} cursor={cursor}; epochs begin at 0, and the cursor "
                f"is 0 to {self.num_samples}"
            )
        left = [(int(epoch), int(begin), int(end)) for epoch, begin, end in state.get("left", [])]
        reached = (0, 0, 0)
        for places in left:
            of_epoch, begin, end = places
            limit = cursor if of_epoch == epoch else self.num_samples
            if not 0 <= begin < end <= limit or of_epoch > epoch or (of_epoch, begin) < reached[::2]:
                raise CheckpointError(
                    f"the checkpoint's data has left epoch={of_epoch} begin={begin} end={end}; allowed are places "
                    f"before epoch={epoch} cursor={cursor}, in order, each of them once"
                )
            reached = places
        self.epoch, self.cursor, self._left = epoch, cursor, left


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
            arrays: a tree of CPU arrays with the samples along the first dimension. Arrays of `numpy.load(path,
                mmap_mode="r")` stay on disk; only the samples of a batch are read.
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


class MapStyle(Protocol):
    """A data set with a length and samples by number, such as a list, or PyTorch's `Dataset` of arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: Any, /) -> Any: ...


class MapData(IndexedData):
    """Global batches of a map-style data set, and this rank's part of each. A rank reads only its own samples.

    Order, last batch and state are those of ArrayData.
    """

    def __init__(
        self,
        world: World,
        samples: MapStyle,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        by_array: bool = False,
    ) -> None:
        """Collective. Give the same data set on every rank: the ranks compare its length and these options.

        Args:
            samples: `samples[number]` is one sample: a tree of CPU arrays and numbers. All samples have the same
                shapes and dtypes. With `augment`, a sample may be anything from which `augment` makes such a tree.
            by_array: `samples[numbers]`, with an int64 array of sample numbers in any order, is a whole batch: a tree
                of new arrays with these samples along the first dimension.
            global_batch, seed, shuffle: as for ArrayData.
            augment: as for ArrayData. Without `by_array` it gets the sample itself, not a copy.

        Raises:
            MismatchError: the data sets of the ranks differ in length, or the options differ.
            DataError: there are fewer samples than ranks. Raised on every rank.
            ConfigError: as for ArrayData. Raised on every rank.
        """
        options = f"global_batch={global_batch} seed={seed} shuffle={shuffle}"
        with world.together("look at the data set"):
            count = len(samples)
        world.agree("compare the data sets", [options, f"{count} samples"])
        with world.together("look at the data set"):
            source: Source = Batches(samples) if by_array else Items(samples)
            super().__init__(world, source, count, global_batch, seed, shuffle, augment)
