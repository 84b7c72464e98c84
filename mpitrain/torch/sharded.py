"""The data of a prepared loop: it reads the batches of all ranks together, and yields this rank's part of each."""

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

# Rank 0 draws so many samples at a time and sends their numbers to the others: for most data sets, once per epoch.
_DRAWN_AT_ONCE = 2**16
_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Share:
    """This rank's share of a batch: `count` of `total` samples. If it is 0, one sample is there that does not count."""

    count: int
    total: int


@uncompiled
class ShardedData:
    """This rank's part of every batch. As with `World.shard`, the parts are disjoint, and together the whole batch.

    If a batch has fewer samples than there are ranks, the last ranks get its first sample, which does not count there.
    A loop need not care about this.

    ShardedData is not a DataLoader. It has the attributes of a DataLoader that loops use, with the values of the given
    data, or None if that has no such attribute. All other attributes are in `given`.

    Attributes:
        share: this rank's share of the present batch; None before the first batch and after the last.
        turn: the number of batches handed out so far.
        given: the data that `prepare` was given.
        dataset: the data set, with the samples of all ranks.
        batch_size: the number of samples of all ranks together.
        sampler, batch_sampler: those of all ranks together; rank 0's draw. If one has `set_epoch`, call it on all
            ranks.
        drop_last, num_workers, collate_fn, generator: as in DataLoader.
    """

    def __init__(self, world: World, data: Iterable[Any]) -> None:
        """Collective; see `prepare` for the data.

        Raises:
            ConfigError: the data already divides samples among ranks. Raised on every rank.
            MismatchError: the ranks' data differ in kind or length, in the samples of a Subset, or in the integers,
                such as labels, of the first and the last sample of a TensorDataset. Other data sets are not compared by
                reading, because a sample may change with each reading.
        """
        self.share: Share | None = None
        self._newest: Share | None = None  # stays after the last batch
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
                loader = copy.copy(data)  # keep everything, also workers and pinned memory, except the batches
                vars(loader).update(batch_sampler=self._parts, in_order=True, _iterator=None)
                self._source = loader
        length = len(data) if _has_length(data) else "an unknown number of"  # type: ignore[arg-type]
        world.agree("compare the data", [*lines, f"{kind}, {length} batches"])

    def __len__(self) -> int:
        """The number of batches, the same as for all ranks together."""
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch. Collective, as is each step: all ranks take the same batches together.

        Raises:
            DataError: the first batch has fewer samples than there are ranks, or a batch cannot be divided.
            MismatchError: a source that every rank reads itself gives the ranks different batches.
        """
        batches = self._drawn(self._parts) if self._parts else self._read()
        for number, (batch, share) in enumerate(batches):
            if number == 0 and share.total < self._world.size:
                raise everywhere(
                    DataError(
                        f"{self._world.name()}: the first batch has {share.total} samples for {self._world.size} "
                        "ranks; a batch is divided among all ranks, so use fewer ranks or larger batches"
                    )
                )
            self.share = self._newest = share
            self.turn += 1
            saw(batch, share.count)
            yield batch
        self.share = None

    def mean(self, value: Any) -> float:
        """Return the mean over all samples of the newest batch, from each rank's mean over its part, such as a loss.

        Collective: every rank calls this for the same batch, in the loop or after it.

        Args:
            value: this rank's mean: a number, or a tensor of one element. On a rank without samples it does not count.

        Raises:
            DataError: there was no batch yet (raised on every rank), or `value` has several elements.
        """
        value = float(self._numbers(value, "mean").reshape(()))
        return float(self._world.mean(value, weight=self._share().count))

    def sum(self, values: Any) -> float:
        """Return the sum over all samples of the newest batch of one value per sample, such as 1 for a right guess.

        Collective, like `mean`. Each sample counts once, also if a rank without samples computes with one of another
        rank.

        Args:
            values: a tensor or array of shape (n,), where n is the length of this rank's part. They are added in
                float64.

        Raises:
            DataError: there was no batch yet (raised on every rank), or `values` has another shape.
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
        """Yield batches of a data set with numbered samples, of which this rank reads only its own."""
        batches = iter(self._source)
        shares = parts.shares  # those of this iteration; another iteration makes its own
        for batch in batches:
            yield batch, shares.popleft()

    def _read(self) -> Iterator[tuple[Any, Share]]:
        """Yield batches of data that can only be read from the beginning: every rank reads all, and keeps its part."""
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
    """A batch sampler that yields this rank's part of each batch of sample numbers that rank 0's sampler draws."""

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
            # Only rank 0 draws, so the random numbers, and the order of an epoch, are those of one process.
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
    """Yield what is compared of a data set, one item per line."""
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
        # Floats are left out, because another CPU may have rounded computed values to other bits.
        exact = [tensor for tensor in dataset.tensors if tensor.device.type == "cpu" and tensor.dtype in _EXACT]
        text += f": {', '.join(shapes)}, checksum {checksum(exact):08x}"
        yield f"{text} of the integers of the first and the last one"
    else:
        yield text


def _checksum_of_numbers(indices: Any) -> int:
    """Return a checksum of the sample numbers of a Subset; 0 if they are other objects, whose text may differ by
    rank."""
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
    except (TypeError, NotImplementedError):  # from data without a length, and from a DataLoader of a stream
        return False
    return True


def _refuse_distributed(loader: DataLoader[Any]) -> None:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise everywhere(
            ConfigError(
                "the DataLoader has a DistributedSampler, which divides samples among ranks; prepare() does that. "
                "Leave the sampler out: pass shuffle=True, and a batch_size for all ranks together"
            )
        )
