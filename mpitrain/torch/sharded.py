"""Batches of all ranks together in, this rank's part of each out: what a loop runs over after `prepare`."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from mpitrain.errors import ConfigError, DataError, everywhere
from mpitrain.shard import part_of
from mpitrain.torch.batches import checksum, described, divided
from mpitrain.torch.observed import samples_come_divided, saw
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world import World

# Rank 0 draws so many samples at a time, and tells the others which: one message an epoch for most data sets.
_DRAWN_AT_ONCE = 2**16
_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Share:
    """What this rank has of a batch: `count` of `total` samples. With 0 it computes with one that does not count."""

    count: int
    total: int


@uncompiled
class ShardedData:
    """This rank's part of every batch; the parts are disjoint and together the whole batch, as `World.shard` has it.

    Where a batch has fewer samples than there are ranks, the last ranks get its first sample, which then counts for
    nothing there: a loop need not know of it.

    It is no DataLoader. It has the attributes that loops ask one for, those of the data that was given, and None where
    that has none; all else is in `given`.

    Attributes:
        share: of the batch that this rank has now; None before the first one and behind the last.
        turn: how many batches have been handed out.
        given: the data that `prepare` was given.
        dataset: with the samples of all ranks.
        batch_size: of all ranks together.
        sampler, batch_sampler: those of all ranks together; rank 0's draw. Call `set_epoch`, where one has it, on all
            ranks.
        drop_last, num_workers, collate_fn, generator: as in DataLoader.
    """

    def __init__(self, world: World, data: Iterable[Any]) -> None:
        """Collective; see `prepare` for the data.

        Raises:
            ConfigError: it deals samples out to ranks already. On every rank.
            MismatchError: the ranks have data of different kinds or lengths, other samples in a Subset, or other
                integers, such as labels, in the first and the last sample of a TensorDataset. Other data sets are not
                read to be compared: a sample may be another one at each reading.
        """
        self.share: Share | None = None
        self._newest: Share | None = None  # also behind the last batch
        self.turn = 0
        self._world = world
        self.given = data
        self.dataset: Any = getattr(data, "dataset", None)
        self.batch_size: int | None = getattr(data, "batch_size", None)
        self.sampler: Any = getattr(data, "sampler", None)
        self.batch_sampler: Any = getattr(data, "batch_sampler", None)
        self.drop_last: bool | None = getattr(data, "drop_last", None)
        self.num_workers: int | None = getattr(data, "num_workers", None)
        self.collate_fn: Any = getattr(data, "collate_fn", None)
        self.generator: Any = getattr(data, "generator", None)
        self._source = data
        samples_come_divided()
        self._parts: _Parts | None = None
        kind, lines = type(data).__name__, list[str]()
        if isinstance(data, DataLoader):
            kind += f", batches of {data.batch_size} samples, drawn by {type(data.sampler).__name__}"
            lines = list(_lines_of(data.dataset))
            _refuse_distributed(data)
            if not isinstance(data.dataset, IterableDataset) and data.batch_sampler is not None:
                self._parts = _Parts(world, data.batch_sampler)
                loader = copy.copy(data)  # all as it is, workers and pinned memory too, but for the batches
                vars(loader).update(batch_sampler=self._parts, in_order=True, _iterator=None)
                self._source = loader
        length = len(data) if _has_length(data) else "an unknown number of"  # type: ignore[arg-type]
        world.agree("compare the data", [*lines, f"{kind}, {length} batches"])

    def __len__(self) -> int:
        """How many batches: as many as all ranks together have."""
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Collective, and so is each step: the ranks take the same batches at the same time.

        Raises:
            DataError: the first batch has fewer samples than there are ranks, or a batch holds what cannot be divided.
            MismatchError: a source that every rank reads itself gives the ranks different batches.
        """
        batches = self._drawn(self._parts) if self._parts else self._read()
        for number, (batch, share) in enumerate(batches):
            if number == 0 and share.total < self._world.size:
                raise everywhere(
                    DataError(
                        f"{self._world.name()}: the first batch has {share.total} samples for {self._world.size} "
                        "ranks; a batch is divided among all ranks: use fewer ranks or larger batches"
                    )
                )
            self.share = self._newest = share
            self.turn += 1
            saw(batch, share.count)
            yield batch
        self.share = None

    def mean(self, value: Any) -> float:
        """The mean over all samples of the newest batch of a mean over this rank's part of it, such as a loss.

        Collective: every rank calls it for the same batch, in the loop or behind it.

        Args:
            value: a number, or a tensor of one element; what it is on a rank without samples does not count.

        Raises:
            DataError: there was no batch yet, on every rank; or `value` has several elements.
        """
        value = float(self._numbers(value, "mean").reshape(()))
        return float(self._world.mean(value, weight=self._share().count))

    def sum(self, values: Any) -> float:
        """The sum over all samples of the newest batch of one value a sample, such as whether a guess was right.

        Collective, as `mean`. Each sample counts once, also where a rank without samples computes with one.

        Args:
            values: a tensor or array of shape (n,), where n is the length of this rank's part. It is added in float64.

        Raises:
            DataError: there was no batch yet, on every rank; or `values` has another shape.
        """
        share, numbers = self._share(), self._numbers(values, "sum")
        if numbers.shape != (max(share.count, 1),):
            raise DataError(
                f"{self._world.name()}: sum(values) takes one value for each of the {max(share.count, 1)} samples of "
                f"this rank's part; it was given the shape {numbers.shape}"
            )
        return float(self._world.sum(float(numbers[: share.count].sum())))

    def _numbers(self, values: Any, call: str) -> numpy.ndarray:
        if isinstance(values, torch.Tensor):
            values = values.detach().to("cpu", torch.float64).numpy()
        numbers = numpy.asarray(values, numpy.float64)
        if call == "mean" and numbers.size != 1:
            raise DataError(
                f"{self._world.name()}: mean(value) takes one number, the mean over this rank's samples; it was given "
                f"the shape {numbers.shape}"
            )
        return numbers

    def _share(self) -> Share:
        if self._newest is None:
            raise everywhere(DataError("there was no batch yet: call mean() and sum() in the loop or after it"))
        return self._newest

    def _drawn(self, parts: _Parts) -> Iterator[tuple[Any, Share]]:
        """From a data set with numbered samples this rank reads only its own."""
        batches = iter(self._source)
        shares = parts.shares  # made by this iteration; another one makes others
        for batch in batches:
            yield batch, shares.popleft()

    def _read(self) -> Iterator[tuple[Any, Share]]:
        """What can only be read from its beginning every rank reads, and keeps its part of each batch."""
        world = self._world
        for number, batch in enumerate(self._source):
            try:
                total, text = described(batch)
            except DataError as error:
                raise DataError(f"{world.name()}: batch {number}: {error}") from None
            world.agree("take the next batch", [f"batch {number}: {text}"])
            own = part_of(total, world.rank, world.size)
            count = own.stop - own.start
            yield divided(batch, own if count else slice(0, 1), total), Share(count, total)
        world.agree("take the next batch", ["no more batches"])


class _Parts:
    """A batch sampler: of each batch of sample numbers that rank 0's draws, this rank's part."""

    def __init__(self, world: World, batches: Any) -> None:
        self._world = world
        self._batches = batches
        self.shares: deque[Share] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        shares = self.shares = deque()
        return self._draw(shares)

    def _draw(self, shares: deque[Share]) -> Iterator[list[Any]]:
        world = self._world
        drawing = iter(self._batches) if world.is_root else None
        while True:
            # Only rank 0 draws: random numbers, and so the order of an epoch, are those of one process.
            with world.together("draw the samples of the next batches"):
                drawn = [] if drawing is None else _some(drawing)
            drawn = world.broadcast(drawn)
            if not drawn:
                return
            for batch in drawn:
                own = part_of(len(batch), world.rank, world.size)
                count = own.stop - own.start
                shares.append(Share(count, len(batch)))
                yield batch[own if count else slice(0, 1)]


def _lines_of(dataset: Any) -> Iterator[str]:
    """What is compared of a data set, an item a line."""
    text = f"{type(dataset).__name__} of {len(dataset) if _has_length(dataset) else 'an unknown number of'} samples"
    if isinstance(dataset, Subset):
        text += f", checksum of their numbers {_checksum_of_numbers(dataset.indices):08x}"
        yield f"{text} (choose them with the same seed on every rank)"
        yield from _lines_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        yield text
        for part in dataset.datasets:
            yield from _lines_of(part)
    elif isinstance(dataset, TensorDataset):
        shapes = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in dataset.tensors]
        # Not of floats: another CPU may round what it has computed to other bits.
        exact = [tensor for tensor in dataset.tensors if tensor.device.type == "cpu" and tensor.dtype in _EXACT]
        text += f": {', '.join(shapes)}, checksum {checksum(exact):08x}"
        yield f"{text} of the integers of the first and the last one"
    else:
        yield text


def _checksum_of_numbers(indices: Any) -> int:
    """Of the samples of a Subset; 0 where they are not numbers or texts, which may look different on each rank."""
    if isinstance(indices, range):
        return zlib.crc32(repr(indices).encode())
    try:
        numbers = numpy.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
    except (TypeError, ValueError):
        return 0
    return zlib.crc32(numbers.tobytes()) if numbers.dtype.kind in "iuUS" else 0


def _some(drawing: Iterator[Any]) -> list[list[Any]]:
    drawn: list[list[Any]] = []
    room = _DRAWN_AT_ONCE
    while room > 0 and (batch := next(drawing, None)) is not None:
        drawn.append(list(batch))
        room -= max(len(drawn[-1]), 1)
    return drawn


def _has_length(data: Any) -> bool:
    try:
        len(data)
    except (TypeError, NotImplementedError):  # what has none, and a DataLoader of a stream
        return False
    return True


def _refuse_distributed(loader: DataLoader[Any]) -> None:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise everywhere(
            ConfigError(
                "the DataLoader has a DistributedSampler, which deals samples out to ranks; prepare() does that. "
                "Leave it out: shuffle=True, and batch_size of all ranks together"
            )
        )
