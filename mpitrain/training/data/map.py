"""Samples by number from anything with a length: files, a database, another library's data set."""

from __future__ import annotations

from typing import Any, Protocol

from mpitrain.training.data.indexed import IndexedData
from mpitrain.training.data.samples import Augment, Batches, Items, Source
from mpitrain.world import World


class MapStyle(Protocol):
    """A data set with a length and samples by number, such as a list or PyTorch's `Dataset`."""

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
            samples: `samples[number]` is one sample: a tree of host arrays and numbers. All samples have the same
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
