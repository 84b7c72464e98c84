"""The batches of data that can only be read from the beginning: every rank reads all, and keeps its part of each."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpitrain.errors import DataError
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.torch.batches import described, divided
from mpitrain.torch.drawn import Share, other_samples, own_part
from mpitrain.world import World


def parts_of_whole_batches(
    world: World,
    source: Iterable[Any],
    virtual: VirtualRanks | None,
    used: tuple[int, int],
    skipped: Callable[[], None],
) -> Iterator[tuple[Any, Share, int]]:
    """Yield this rank's part of each batch, its share, and the checksum of all batches so far. Collective.

    Args:
        used: the number of batches that were used before, which are read and left out, and their checksum.
        skipped: is called after these batches, if there are any.

    Raises:
        DataError: a batch cannot be divided.
        MismatchError: the ranks read different batches, or go on from different positions. Raised on every rank.
        CheckpointError: the batches that were used have other samples than then. Raised on every rank.
    """
    (first, expected), checked, number, of_first = used, 0, 0, 0
    for number, batch in enumerate(source, 1):
        try:
            total, text = described(batch)
        except DataError as error:
            raise DataError(f"{world.name()}: batch {number - 1}: {error}") from None
        of_first = of_first or total
        checked = zlib.crc32(text.encode(), checked)
        if number == first:
            _compare(world, first, expected, number, checked)
            skipped()
        if number <= first:
            continue
        world.agree("take the next batch", [f"batch {number - 1}: {text}"])
        own, share = own_part(world, virtual, total, of_first)
        yield divided(batch, own, total), share, checked
    if number < first:
        _compare(world, first, expected, number, checked)
    world.agree("take the next batch", ["no more batches"])


def _compare(world: World, first: int, expected: int, number: int, checked: int) -> None:
    """Compare the `number` batches that were read with the `first` batches that were used. Collective."""
    position = f"after {first} batches, checksum {expected:08x}"
    world.agree("go on within an epoch", [position, f"{number} batches are there, checksum {checked:08x}"])
    if number < first:
        raise other_samples(first, f"there are only {number}")
    if checked != expected:
        raise other_samples(first, "their samples differ")
