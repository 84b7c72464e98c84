"""A DataLoader that yields this rank's part of every batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mpitrain.adapters.torch_random import restored, seed
from mpitrain.errors import ConfigError, everywhere
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.torch.batches import checksum_of_sample, has_length
from mpitrain.torch.drawn import PartSampler, Share
from mpitrain.world.shard import part_of
from mpitrain.world.world import World


class Delivery(NamedTuple):
    """What is known about a part of a batch: its share, and the checksum of all samples drawn, or a text about this
    batch."""

    share: Share
    checked: int
    text: str = ""


class PartLoader:
    """A copy of a loader that yields this rank's part of each batch.

    The samples are divided before they are collated. If samples are numbered, each rank reads only its own. Every rank
    reads the whole of a stream.

    Attributes:
        loader: the copy. Its workers and its pinned memory are those of the given loader.
        parts: draws the numbers of samples; None: the data is a stream.
        has_own_iter: the loader's class has an `__iter__` of its own, which may do anything with the batches of
            DataLoader's.
    """

    def __init__(self, world: World, loader: DataLoader[Any], virtual: VirtualRanks | None) -> None:
        """`loader` is not changed. It makes batches of samples. A stream has no virtual ranks."""
        self.loader: Any = copy.copy(loader)
        own = vars(self.loader)
        own.update(in_order=True, _iterator=None)
        kind: Any = type(loader)
        self.has_own_iter = (
            kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
        )
        # Iterators that the class made once for all epochs. They take their batches from the loader's own sampler.
        self._kept = [name for name, value in own.items() if isinstance(value, _BaseDataLoaderIter)]
        if self._kept and loader.num_workers:
            own.update(persistent_workers=True)
            if not isinstance(loader.sampler, SequentialSampler):
                world.print(
                    f"mpitrain: {kind.__name__} has begun to read before prepare(), so the order of the samples is not "
                    "that of one process"
                )
        self.parts: PartSampler | None = None
        if isinstance(loader.dataset, IterableDataset):
            own.update(collate_fn=_PartCollate(world.rank, world.size, loader.collate_fn))
        else:
            most = len(loader) if self._kept else None
            self.parts = PartSampler(world, loader.batch_sampler, virtual, most)
            own.update(batch_sampler=self.parts)
            if self.has_own_iter and has_length(loader.dataset):
                # A whole epoch at once: an __iter__ may read in another thread, where nothing can be drawn.
                self.parts.room = max(self.parts.room, len(loader.dataset) + 1)  # type: ignore[arg-type]
        self._saw: Callable[[Any, Delivery], None] = lambda batch, delivery: None
        if virtual:
            begin = partial(_begin_worker, loader.dataset, loader.worker_init_fn)
            own.update(dataset=SeededSamples(loader.dataset), worker_init_fn=begin)

    def has_seed(self, epoch: int) -> bool:
        """Whether an undisturbed run has had its workers, and the seed for them, since before this epoch began."""
        stays = epoch > 0 and self.loader.persistent_workers and self.loader._iterator is None
        return bool(self._kept or stays)

    def batches(self) -> Iterator[tuple[Any, Delivery]]:
        """Yield each part of a DataLoader without an `__iter__` of its own."""
        batches = iter(self.loader)  # draws a seed for workers, before the sampler draws
        for batch in batches:
            yield self._delivered(batches, batch)

    def watched(self, saw: Callable[[Any, Delivery], None]) -> Iterator[Any]:
        """Return the iterator of the loader's own `__iter__`. `saw` is called for each part that DataLoader's yields to
        it."""
        self._saw = saw  # an iterator of an earlier epoch may continue
        vars(self.loader)["_get_iterator"] = partial(_watched_iterator, ref(self))
        for name in self._kept:
            vars(self.loader)[name] = DataLoader.__iter__(self.loader)
        return iter(self.loader)

    def watched_iterator(self) -> Any:
        """Return one of DataLoader's own iterators, which reports to `saw`."""
        iterator = type(self.loader)._get_iterator(self.loader)
        iterator._next_data = partial(self._next_data, ref(iterator))  # a cycle would keep its workers alive
        if self.parts is not None:
            iterator._sampler_iter.draw()
        return iterator

    def _next_data(self, weak: ref[Any]) -> Any:
        iterator: Any = weak()
        batch, delivery = self._delivered(iterator, type(iterator)._next_data(iterator))
        self._saw(batch, delivery)
        return batch

    def _delivered(self, iterator: Any, batch: Any) -> tuple[Any, Delivery]:
        if self.parts is None:
            return batch["batch"], Delivery(Share(batch["count"], batch["total"]), 0, batch["text"])
        return batch, Delivery(*iterator._sampler_iter.shares.popleft())


def _watched_iterator(weak: ref[PartLoader]) -> Any:
    loader = weak()
    assert loader is not None
    return loader.watched_iterator()


class _PartCollate:
    """Collates this rank's part of the samples of a stream. It runs in workers."""

    def __init__(self, rank: int, size: int, collate: Callable[[Any], Any]) -> None:
        self._rank, self._size, self._collate = rank, size, collate

    def __call__(self, samples: Any) -> dict[str, Any]:
        own = part_of(len(samples), self._rank, self._size)
        count = own.stop - own.start
        checked = checksum_of_sample(samples[-1], checksum_of_sample(samples[0]))
        return {
            "count": count,
            "total": len(samples),
            "text": f"{len(samples)} samples, checksum {checked:08x}",
            "batch": self._collate(samples[own] if count else samples[:1]),
        }


def refuse_distributed(loader: DataLoader[Any]) -> None:
    """Raise ConfigError on every rank if a loader already divides the samples among ranks."""
    samplers: list[Any] = [loader.sampler, loader.batch_sampler]
    while (inner := getattr(samplers[-1], "sampler", None)) is not None and len(samplers) < 9:
        samplers.append(inner)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise everywhere(
            ConfigError(
                "the DataLoader has a DistributedSampler, which divides samples among ranks; prepare() does that. "
                "Leave the sampler out: pass shuffle=True, and a batch_size for all ranks together"
            )
        )


class SeededSamples:
    """A data set with numbered samples, for a loader whose sampler yields pairs of a key and a number.

    PyTorch's, NumPy's and Python's own generators are seeded from the key before each sample, also in the workers of a
    loader. So `__getitem__` may draw from them, as transforms do, whatever this rank has read before.
    """

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __getitems__(self, chosen: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        read = []
        with restored():
            for key, number in chosen:
                seed(key)
                read.append(self._samples[number])
        return read

    def __len__(self) -> int:
        return len(self._samples)


def _begin_worker(samples: Any, own: Callable[[int], None] | None, number: int) -> None:
    """Start a loader's worker with this number: a worker_init_fn that calls the loader's own, if it has one.

    `get_worker_info().dataset` is then the data set itself, as it is without virtual ranks.
    """
    object.__setattr__(get_worker_info(), "dataset", samples)  # PyTorch's object is frozen
    if own is not None:
        own(number)
