"""Batches of a data set with numbered samples: rank 0 draws the numbers, and each rank reads its part of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mpitrain.errors import CheckpointError, DataError, everywhere
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.torch.batches import checksum_of_numbers
from mpitrain.world.shard import part_in
from mpitrain.world.world import World

# The number of samples that rank 0 draws at a time and sends to the others: for most data sets, once per epoch.
_DRAWN_AT_ONCE = 2**16


@dataclass(frozen=True)
class Share:
    """This rank's share of a batch: `count` of `total` samples. If 0, the rank has one sample, which does not count.

    Attributes:
        virtual: the number of samples of each of this rank's virtual ranks.
    """

    count: int
    total: int
    virtual: tuple[int, ...] = ()


def own_part(world: World, virtual: VirtualRanks | None, total: int, of_first: int) -> tuple[slice, Share]:
    """Return this rank's part of a batch of `total` samples: that of its virtual ranks, if there are any.

    `of_first` is the number of samples of the first batch of the epoch.
    """
    if virtual is None:
        part, counts = part_in(world, total), []
    else:
        parts = [virtual.part(total, of_first, number) for number in virtual.of_rank(world)]
        part, counts = slice(parts[0].start, parts[-1].stop), [one.stop - one.start for one in parts]
    count = part.stop - part.start
    return part if count else slice(0, 1), Share(count, total, tuple(counts))


class PartSampler:
    """A batch sampler that yields this rank's part of each batch of sample numbers that rank 0's sampler draws.

    Attributes:
        used: the number of batches that the next iteration skips, and the checksum of their numbers.
        epoch: the number of the next iteration, for the random numbers of samples.
        before: is called on rank 0 before the next iteration draws; None: nothing is called.
        skipped: is called when the skipped batches have been drawn.
        room: the number of samples that are drawn at a time.
        thread: the number of the only thread that may draw samples.
        sampler, batch_size, drop_last: those of the batch sampler, for loaders that ask it.
    """

    def __init__(self, world: World, batches: Any, virtual: VirtualRanks | None, most: int | None = None) -> None:
        """`batches` is the batch sampler of all ranks together. With virtual ranks, see SeededSamples.

        An iteration ends after `most` batches, even if the sampler never ends.
        """
        self._world, self._batches, self._virtual, self._most = world, batches, virtual, most
        self.used = 0, 0
        self.epoch = 0
        self.before: Callable[[], None] | None = None
        self.skipped: Callable[[], None] | None = None
        self.room, self.thread = _DRAWN_AT_ONCE, threading.get_ident()
        self.sampler: Any = getattr(batches, "sampler", None)
        self.batch_size: Any = getattr(batches, "batch_size", None)
        self.drop_last: Any = getattr(batches, "drop_last", None)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Drawing:
        batches = self._batches if self._most is None else islice(self._batches, self._most)
        return Drawing(self._world, batches, self._virtual, self)


class Drawing:
    """One iteration over the batches.

    Attributes:
        shares: this rank's share of each batch that has been yielded and not taken by the loop, with the checksum of
            the numbers of all samples up to this batch.
    """

    def __init__(
        self,
        world: World,
        batches: Any,
        virtual: VirtualRanks | None,
        sampler: PartSampler,
    ) -> None:
        """`sampler` has the settings of this iteration."""
        self.shares: deque[tuple[Share, int]] = deque()
        self._world, self._batches, self._virtual = world, batches, virtual
        self._epoch, self._taken, self._of_first = sampler.epoch, 0, 0
        self._numbers: Iterator[Any] | None = None
        self._is_over = False  # nothing more will be drawn
        self._drawn: deque[list[Any]] = deque()
        self._used, self._checksum, self._before, self._skipped = sampler.used, 0, sampler.before, sampler.skipped
        self._room, self._thread = sampler.room, sampler.thread

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> list[Any]:
        self.leave_out()
        batch = self._take()
        if batch is None:
            raise StopIteration
        own, share = own_part(self._world, self._virtual, len(batch), self._of_first)
        self.shares.append((share, self._checksum))
        if self._virtual is None:
            return batch[own]
        keys = (self._virtual.sample_key(self._epoch, self._taken, place) for place in range(own.start, own.stop))
        return list(zip(keys, batch[own], strict=True))

    def leave_out(self) -> None:
        """Draw the batches that were used before a restart. Collective. A second call does nothing.

        Raises:
            CheckpointError: their samples have changed. Raised on every rank.
            MismatchError: the ranks continue from different positions.
        """
        (count, checksum), self._used = self._used, (0, 0)
        if not count:
            return
        self._world.agree("continue within an epoch", [f"after {count} batches, checksum {checksum:08x}"])
        batches = [self._take() for _ in range(count)]
        if None in batches:
            raise other_samples(count, f"there are only {count - batches.count(None)}")
        if self._checksum != checksum:
            raise other_samples(count, "others are drawn")
        if self._skipped is not None:
            self._skipped()

    def draw(self) -> None:
        """Draw the first samples now, so that another thread can take them. Collective."""
        self.leave_out()
        if not self._drawn and not self._is_over:
            self._draw()

    def _take(self) -> list[Any] | None:
        if not self._drawn and not self._is_over:
            self._draw()
        if not self._drawn:
            return None
        batch = self._drawn.popleft()
        self._taken += 1
        self._of_first = self._of_first or len(batch)
        self._checksum = checksum_of_numbers(batch, self._checksum)
        return batch

    def _draw(self) -> None:
        """Let rank 0 draw, so that the random numbers and the order of an epoch are those of one process."""
        check_thread(self._world, self._thread)
        drawn: list[list[Any]] = []
        is_over = False
        with self._world.together("draw the samples of the next batches"):
            if self._world.is_root:
                if self._numbers is None:
                    if self._before is not None:
                        self._before()
                    self._numbers = iter(self._batches)
                drawn, is_over = _some(self._numbers, self._room)
        drawn, self._is_over = self._world.broadcast_object((drawn, is_over))
        self._drawn.extend(drawn)


def check_thread(world: World, thread: int) -> None:
    """Check that this is the thread with this number, in which the ranks take batches together.

    Raises:
        DataError: it is another thread.
    """
    if threading.get_ident() != thread:
        raise DataError(
            f"{world.name()}: prepared data is read in one thread and used in another one, "
            f"{threading.current_thread().name}. The ranks take each batch together, and the newest one weights "
            "gradients and means: loop over the data in the thread that uses the batches, without a "
            "BackgroundGenerator or prefetcher around it. To read ahead, give num_workers to the DataLoader"
        )


def other_samples(count: int, problem: str) -> CheckpointError:
    """The error for data that has changed since before a restart, for every rank."""
    return everywhere(
        CheckpointError(
            f"the loop continues after {count} batches of an epoch, but these are not the batches it used before: "
            f"{problem}. Every attempt must have the same data in the same order: seed what shuffles it, or start anew"
        )
    )


def _some(drawing: Iterator[Any], room: float) -> tuple[list[list[Any]], bool]:
    """Return the next batches of up to `room` samples, and whether they are the last."""
    drawn: list[list[Any]] = []
    while room > 0:
        batch = next(drawing, None)
        if batch is None:
            return drawn, True
        drawn.append(list(batch))
        room -= max(len(drawn[-1]), 1)
    return drawn, False
