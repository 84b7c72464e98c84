"""World.shard: each rank's part of every batch."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.errors import DataError


@pytest.mark.parametrize(
    "lengths", [(7,), (14, 14, 14), (8, 8, 5), (12, 12, 1), (9, 0, 9)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_parts_are_disjoint_complete_and_in_order(world: World, lengths: tuple[int, ...]) -> None:
    starts = numpy.cumsum((0, *lengths))
    batches = [numpy.arange(begin, begin + length) for begin, length in zip(starts, lengths, strict=False)]
    parts = list(world.shard(batches))
    assert len(parts) == len(batches)
    every = world.allgather(parts)
    for index, batch in enumerate(batches):
        of_ranks = [its[index] for its in every]
        assert numpy.concatenate(of_ranks).tolist() == batch.tolist()
        sizes = [len(part) for part in of_ranks]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_shard_of_trees_from_a_generator(world: World) -> None:
    def batches() -> Any:
        for length in (10, 9):
            yield {"x": numpy.arange(2 * length).reshape(length, 2), "y": (numpy.arange(length), None)}

    for part, length in zip(world.shard(batches()), (10, 9), strict=True):
        rows = numpy.array_split(numpy.arange(length), world.size)[world.rank]
        assert part["x"].tolist() == [[2 * row, 2 * row + 1] for row in rows]
        assert part["y"][0].tolist() == rows.tolist()
        assert part["y"][1] is None


def test_shard_starts_where_it_is_told(world: World) -> None:
    batches = [numpy.full(7, 0), numpy.full(7, 1), numpy.full(1, 2)]
    whole = [part.tolist() for part in world.shard(batches)]
    for start in range(4):
        assert [part.tolist() for part in world.shard(batches, start=start)] == whole[start:]
    with pytest.raises(DataError, match="there are 3 batches, and the shard starts at batch 4"):
        list(world.shard(batches, start=4))
    with pytest.raises(ValueError, match="start=-1"):
        next(world.shard(batches, start=-1))


def test_shard_of_nothing(world: World) -> None:
    for start in (0, 1):
        with pytest.raises(DataError, match=f"there are 0 batches, and the shard starts at batch {start}") as caught:
            list(world.shard([], start=start))
        assert caught.value.known_everywhere


def test_first_batch_smaller_than_the_ranks(world: World) -> None:
    for start in (0, 1):
        shard = world.shard([numpy.zeros(world.size - 1), numpy.zeros(world.size)], start=start)
        with pytest.raises(DataError, match=f"batch 0 has {world.size - 1} samples for {world.size} ranks") as caught:
            next(shard)
        assert caught.value.known_everywhere


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((numpy.zeros(8), numpy.zeros(9)), r"found \[0\] 8, \[1\] 9"),
        ([numpy.zeros(8), 3.0], r"found \[0\] 8, \[1\] a number"),
        ({"x": numpy.array(1.0)}, r"found \['x'\] a number"),
        ([], "found no arrays"),
    ],
)
def test_batches_without_a_number_of_samples(world: World, batch: Any, text: str) -> None:
    shard = world.shard([numpy.zeros(7), batch])
    next(shard)
    with pytest.raises(DataError, match=f"batch 1: .*{text}"):
        next(shard)
