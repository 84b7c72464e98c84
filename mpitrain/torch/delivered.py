"""Batches of sources whose samples rank 0 does not draw: which batch each one is, and this rank's part of it.

Data that can only be read from the beginning comes in whole batches: every rank reads all of them, and keeps its part
of each.

The class of a DataLoader may have an `__iter__` of its own, such as one that moves batches to a device. Such an
`__iter__` takes batches from DataLoader's, and may yield others, leave some out, repeat or reorder them, or take some
ahead. The weight of a batch and its place in the data are those of the batch that DataLoader made. Batches are told
apart by their tensors; new tensors belong to the newest batch if none is taken ahead. Such an `__iter__` must treat a
rank's part as it would treat the batch of one process. So three things are refused: slices of a batch, a part from
which samples are left out, and batches that seem to be left out because of their number of samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

from mpitrain.errors import DataError, everywhere
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.torch.batch_form import BatchForm
from mpitrain.torch.batches import has_rows, leaves
from mpitrain.torch.drawn import Share, other_samples, own_part
from mpitrain.torch.part_loader import Delivery, PartLoader
from mpitrain.world.world import World

_MOST_KEPT = 1024  # batches; earlier ones are no longer told apart
_NO_MORE = object()


def after_used(
    batches: Iterable[tuple[Any, Delivery, int]], used: tuple[int, int], skipped: Callable[[], None]
) -> Iterator[tuple[Any, Delivery, int]]:
    """Skip those batches of `followed` that were used before. They are read.

    Args:
        used: their number, and the checksum of the numbers of their samples.
        skipped: is called after them, if there are any.

    Raises:
        CheckpointError: their samples have changed. Raised on every rank.
    """
    first, expected = used
    for batch, delivery, number in batches:
        if number == first:
            if delivery.checked != expected:
                raise other_samples(first, "others are drawn")
            skipped()
        if number > first:
            yield batch, delivery, number


def followed(world: World, loader: PartLoader) -> Iterator[tuple[Any, Delivery, int]]:
    """Yield the results of the loader's own `__iter__`, each with what is known about the batch and its number from 1.

    Collective: the ranks compare the numbers.

    Raises:
        DataError: the batch cannot be identified. Raised on every rank.
        MismatchError: the ranks' loaders yield different batches, or one is at its end. Raised on every rank.
    """
    seen = _Seen(is_divided=world.size > 1)
    batches = loader.watched(seen.add)
    # Not a for loop: it would call __iter__ again, which may return its own object and start reading again.
    while (batch := next(batches, _NO_MORE)) is not _NO_MORE:
        number, problem = seen.find(batch)
        delivery = seen.deliveries.get(number)
        text = problem or f"batch {number - 1} {delivery.text if delivery else ''}".rstrip()
        world.agree("take the next batch", [text])
        if problem or delivery is None:
            problem = problem or "yields a batch of long ago"
            remedy = "Let it yield each batch of DataLoader.__iter__ in turn, or the same tensors; or do in the loop"
            raise _refused(loader, f"{problem}, so the samples in it are not known. {remedy} what it does")
        yield batch, delivery, number
    world.agree("take the next batch", ["no more batches"])
    if problem := seen.left_out():
        raise _refused(loader, problem)


def _refused(loader: PartLoader, problem: str) -> DataError:
    name = f"{type(loader.loader).__module__}.{type(loader.loader).__qualname__}"
    return everywhere(DataError(f"the __iter__ of {name} {problem}"))


class _Seen:
    """The newest batches that DataLoader's own iterators have yielded, by number."""

    def __init__(self, is_divided: bool) -> None:
        self.deliveries: dict[int, Delivery] = {}
        self._newest = self._yielded = 0
        # The batches that were not yielded; and the sizes, over all ranks, of batches that were and were not yielded.
        self._waiting: dict[int, int] = {}
        self._used: set[int] = set()
        self._left: set[int] = set()
        self._is_divided = is_divided
        self._numbers: dict[int, tuple[ref[Any], int]] = {}  # by id; 0: it is in several batches

    def add(self, batch: Any, delivery: Delivery) -> None:
        self._newest += 1
        self.deliveries[self._newest] = delivery
        self.deliveries.pop(self._newest - _MOST_KEPT, None)
        self._waiting[self._newest] = delivery.share.total
        if long_ago := self._waiting.pop(self._newest - _MOST_KEPT, 0):
            self._left.add(long_ago)
        if self._newest % _MOST_KEPT == 0:
            self._numbers = {key: entry for key, entry in self._numbers.items() if entry[0]() is not None}
        for leaf in leaves(batch):
            try:
                weak = ref(leaf)
            except TypeError:  # a text or number
                continue
            known = self._find_leaf(leaf)
            self._numbers[id(leaf)] = weak, self._newest if known in (None, self._newest) else 0

    def left_out(self) -> str:
        """At the end, describe what is wrong with the batches that were not yielded. Equal on all ranks."""
        left = self._left | set(self._waiting.values())
        if not self._is_divided or not left or left & self._used:
            return ""
        sizes = " and ".join(map(str, sorted(left)))
        return (
            f"yields no batch of {sizes} samples. It must not ask for the length of a batch, because each "
            "rank has a part of its samples. For full batches alone, give drop_last=True to the DataLoader"
        )

    def find(self, batch: Any) -> tuple[int, str]:
        """Return the number of a batch, and the problem, if any."""
        number, problem = self._find(batch)
        if not problem and number in self.deliveries:
            self._used.add(self.deliveries[number].share.total)
            self._waiting.pop(number, None)
        return number, problem

    def _find(self, batch: Any) -> tuple[int, str]:
        numbers = {self._find_leaf(leaf) for leaf in leaves(batch)} - {None, 0}
        ahead, before = self._newest - self._yielded, self._yielded
        if len(numbers) == 1:
            number = int(numbers.pop() or 0)
            self._yielded = max(before, number)
            return number, ""
        if numbers:
            return 0, "yields tensors of several batches of DataLoader.__iter__ at once"
        if self._are_slices(batch):
            return 0, "yields slices of a batch, of which each rank has only a part"
        if ahead == 1:
            self._yielded = self._newest
            return self._newest, self._problem_of(batch, self.deliveries[self._newest].share)
        return 0, f"has taken {ahead} batches of DataLoader.__iter__ for the one it yields, with new tensors"

    @staticmethod
    def _problem_of(batch: Any, share: Share) -> str:
        """Report that samples of a rank's part are left out if no dimension of the new tensors has their number."""
        shapes = [leaf.shape for leaf in leaves(batch) if has_rows(leaf)]
        is_known = any(share.count in shape or shape[0] > share.count for shape in shapes)
        if is_known or not shapes or share.count in (0, share.total):
            return ""
        return "yields fewer samples than a rank's part has"

    def _are_slices(self, batch: Any) -> bool:
        """Whether all tensors with rows are rows of known tensors. If all have one width, columns may have been cut."""
        rows = [leaf for leaf in leaves(batch) if has_rows(leaf)]
        bases: list[Any] = [getattr(leaf, "_base", None) for leaf in rows]
        return len({leaf.shape[1:2] for leaf in rows}) > 1 and all(
            self._find_leaf(base) is not None and leaf.shape[1:] == base.shape[1:]
            for leaf, base in zip(rows, bases, strict=True)
        )

    def _find_leaf(self, leaf: Any) -> int | None:
        entry = self._numbers.get(id(leaf))
        return entry[1] if entry and entry[0]() is leaf else None


def parts_of_whole_batches(
    world: World, source: Iterable[Any], form: BatchForm, virtual: VirtualRanks | None
) -> Iterator[tuple[Any, Delivery]]:
    """Yield this rank's part of each batch.

    Raises:
        DataError: a batch cannot be divided. Raised on every rank.
    """
    of_first = 0
    for number, batch in enumerate(source):
        try:
            total, text = form.described(batch)
            of_first = of_first or total
            own, share = own_part(world, virtual, total, of_first)
            part = form.divided(batch, own)
        except DataError as error:
            problem = f"batch {number}: {error}"
            world.agree("take the next batch", [problem])
            raise everywhere(DataError(f"all ranks: {problem}")) from None
        yield part, Delivery(share, 0, text)


def compared(
    world: World, parts: Iterable[tuple[Any, Delivery]], used: tuple[int, int], skipped: Callable[[], None]
) -> Iterator[tuple[Any, Delivery]]:
    """Yield the parts of batches that every rank has read, with the checksum of all batches so far. Collective.

    Args:
        used: the number of batches that were used before, which are read and left out, and their checksum.
        skipped: is called after these batches, if there are any.

    Raises:
        MismatchError: the ranks read different batches, or continue from different positions. Raised on every rank.
        CheckpointError: the batches that were used have changed. Raised on every rank.
    """
    (first, expected), checked, number = used, 0, 0
    for number, (batch, delivery) in enumerate(parts, 1):
        checked = zlib.crc32(delivery.text.encode(), checked)
        if number == first:
            _compare(world, first, expected, number, checked)
            skipped()
        if number <= first:
            continue
        world.agree("take the next batch", [f"batch {number - 1}: {delivery.text}"])
        yield batch, delivery._replace(checked=checked)
    if number < first:
        _compare(world, first, expected, number, checked)
    world.agree("take the next batch", ["no more batches"])


def _compare(world: World, first: int, expected: int, number: int, checked: int) -> None:
    """Compare the `number` batches that were read with the `first` batches that were used. Collective."""
    position = f"after {first} batches, checksum {expected:08x}"
    world.agree("continue within an epoch", [position, f"{number} batches are there, checksum {checked:08x}"])
    if number < first:
        raise other_samples(first, f"there are only {number}")
    if checked != expected:
        raise other_samples(first, "their samples differ")
