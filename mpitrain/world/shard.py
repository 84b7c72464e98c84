"""A rank's part of a number of items, and of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.errors import DataError, everywhere
from mpitrain.tree import Tree, leaves, num_samples, rebuild

if TYPE_CHECKING:
    from mpitrain.world.world import World


def part_of(length: int, rank: int, size: int) -> slice:
    """The part of `length` items that belongs to `rank`: contiguous; sizes differ by at most one, larger parts
    first."""
    share, rest = divmod(length, size)
    begin = rank * share + min(rank, rest)
    return slice(begin, begin + share + (rank < rest))


def part_in(world: World, length: int) -> slice:
    """This rank's part of a batch; with `mpitrain plan`, the part that it would have among more ranks."""
    return part_of(length, world.rank, world.size * (world.watch.divisor if world.watch else 1))


class Part(NamedTuple):
    """This rank's part of a batch: `own` of `total` samples. If 0, the rank has one sample, which does not count."""

    own: int
    total: int


# At most one: the part of the newest batch, until its loop ends. An error may be due to it.
newest_part: list[Part] = []


def shards(world: World, batches: Iterable[Tree], start: int) -> Iterator[Tree]:
    """See World.shard."""
    if start < 0:
        raise ValueError(f"{world.name()}: start={start}; it is the number of batches to skip, 0 or more")
    index = -1
    for index, batch in enumerate(batches):
        if 0 < index < start:
            continue
        try:
            length = num_samples(batch)
        except DataError as error:
            raise DataError(f"{world.name()}: batch {index}: {error}") from None
        # Only the first batch must meet this rule: the last one may be smaller, and a resumed run may begin with it.
        if index == 0 and length < world.size:
            raise everywhere(
                DataError(
                    f"{world.name()}: batch 0 has {length} samples for {world.size} ranks; "
                    "use fewer ranks or larger batches"
                )
            )
        if index < start:
            continue
        own = part_in(world, length)
        newest_part[:] = [Part(own.stop - own.start, length)]
        values = (leaf[own] for _, leaf in leaves(batch))
        part = rebuild(batch, values.__next__)
        if world.observer:
            world.observer.saw(part)
        yield part
    newest_part.clear()
    if index < max(start - 1, 0):
        raise everywhere(
            DataError(f"{world.name()}: there are {index + 1} batches, and the shard starts at batch {start}")
        )


def largest_part(whole: float, num_ranks: int) -> float:
    """Return rank 0's part of a batch, the largest of all; for a weight that is not a number of samples, an equal
    share."""
    return -(-whole // num_ranks) if float(whole).is_integer() else whole / num_ranks
