"""Samples that come in sequence, and can only be read from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from mpitrain.data.samples import Augment, augmented, stack
from mpitrain.data.shares import Shares, check_counts
from mpitrain.errors import CheckpointError, DataError
from mpitrain.tree import Tree, leaves, rebuild
from mpitrain.world.world import World


class StreamData:
    """Global batches of a stream of samples, and this rank's part of each, in the order of the stream.

    Every rank reads the whole stream and keeps its part, so a sample should be cheap to read. Do expensive work, such
    as decoding, in `augment`, which is called only for this rank's samples. A rank keeps a global batch of samples in
    memory, as the stream yields them.
    """

    def __init__(
        self,
        world: World,
        samples: Callable[[int], Iterable[Any]],
        *,
        global_batch: int,
        seed: int = 0,
        augment: Augment | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Collective. The ranks compare these options, but not the samples of their streams.

        Args:
            samples: is called with the number of an epoch, from 0, and returns the samples of that epoch: the same
                samples in the same order on every rank and in every call. Samples are trees of CPU arrays and numbers,
                all of the same shapes and dtypes. With `augment`, a sample may be anything from which `augment` makes
                such a tree.
            global_batch: the number of samples of all ranks together in one step.
            seed: for `augment`, at least 0.
            augment: as for ArrayData. It gets the sample itself, not a copy.
            num_samples: the number of samples of an epoch. If given, an epoch with another number is an error. This
                finds a file that is cut short on one machine.

        Raises:
            MismatchError: the options differ between ranks.
            DataError: `num_samples` is less than the number of ranks. Raised on every rank.
            ConfigError: as for ArrayData. Raised on every rank.
        """
        world.agree("compare the data sets", [f"global_batch={global_batch} seed={seed} num_samples={num_samples}"])
        with world.together("look at the data set"):
            check_counts(world, num_samples, global_batch, seed)
        self.global_batch = int(global_batch)
        self.num_samples = None if num_samples is None else int(num_samples)
        self.epoch = 0
        self.cursor = 0  # samples of this epoch that all ranks together have used
        self._name = world.name()
        self._shares = Shares(world)
        self._samples = samples
        self._seed = int(seed)
        self._augment = augment
        self._open: Iterator[Any] | None = None  # at `cursor` of `epoch`

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches of an epoch. The last batch may be smaller.

        Raises:
            DataError: `num_samples` was not given.
        """
        if self.num_samples is None:
            raise DataError(f"{self._name}: the number of samples of this stream is unknown; pass num_samples=")
        return -(-self.num_samples // self.global_batch)

    def __iter__(self) -> Iterator[tuple[Tree, int]]:
        return self

    def __next__(self) -> tuple[Tree, int]:
        """Return this rank's part of the next global batch, and its number of samples (0 if there are too few).

        Raises:
            DataError: an epoch has no samples, has another number of samples than `num_samples`, or ends before the
                cursor that was restored.
        """
        stream, self._open = (
            self._open,
            None,
        )  # do not read on after a failure: the stream would seem to be at its end
        epoch, cursor = self.epoch, self.cursor
        if stream is None:
            stream = self._skip_to(epoch, cursor)
        items = list(islice(stream, self.global_batch))
        if not items and cursor:
            self._check_end(epoch, cursor)
            epoch, cursor = epoch + 1, 0
            stream = iter(self._samples(epoch))
            items = list(islice(stream, self.global_batch))
        if not items:
            raise DataError(f"{self._name}: the stream of epoch {epoch} has no samples")
        if len(items) < self.global_batch:
            self._check_end(epoch, cursor + len(items))
        part = self._shares.part(len(items))
        count = part.stop - part.start
        batch = self._batch(epoch, cursor, items, part if count else slice(0, 1))
        if not count:
            values = (leaf[:0] for _, leaf in leaves(batch))
            batch = rebuild(batch, values.__next__)
        self.epoch, self.cursor, self._open = epoch, cursor + len(items), stream
        return batch, count

    def _batch(self, epoch: int, cursor: int, items: list[Any], part: slice) -> Tree:
        numbers = range(cursor + part.start, cursor + part.stop)
        if self._augment is None:
            return stack(items[part], numbers)
        return augmented(self._augment, iter(items[part]), numbers, self._seed, epoch)

    def _skip_to(self, epoch: int, cursor: int) -> Iterator[Any]:
        stream = iter(self._samples(epoch))
        skipped = sum(1 for _ in islice(stream, cursor))
        if skipped < cursor:
            raise DataError(
                f"{self._name}: the stream of epoch {epoch} has {skipped} samples, but training has passed {cursor} "
                "of them; is it the stream that the training began with?"
            )
        return stream

    def _check_end(self, epoch: int, count: int) -> None:
        if self.num_samples not in (None, count):
            raise DataError(
                f"{self._name}: the stream of epoch {epoch} has {count} samples, and num_samples={self.num_samples}; "
                "is a file cut short?"
            )

    def share_out(self, samples_per_second: float) -> None:
        """From the next batch on, divide batches among ranks in proportion to their speeds, in samples/s. Collective.

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
        """Return the position in the data. The state is the same on every rank and for any world size."""
        return {"epoch": self.epoch, "cursor": self.cursor, "seed": self._seed, "num_samples": self.num_samples}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: open the stream again, and skip the samples that were used.

        Raises:
            CheckpointError: the state belongs to another stream or seed, or is out of range.
        """
        for key, value in (("num_samples", self.num_samples), ("seed", self._seed)):
            if state[key] != value:
                raise CheckpointError(f"the checkpoint's data has {key}={state[key]}, this run's {value}")
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        if epoch < 0 or cursor < 0:
            raise CheckpointError(f"the checkpoint's data is at epoch={epoch} cursor={cursor}; both begin at 0")
        self.epoch, self.cursor, self._open = epoch, cursor, None
