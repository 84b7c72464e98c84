"""Objects and messages between the ranks of a World."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.errors import MismatchError


def test_barrier(world: World) -> None:
    assert world.barrier() is None


def test_broadcast_from_every_rank(world: World) -> None:
    for root in range(world.size):
        value = {"from": root, "array": numpy.arange(root), "none": None}
        # What the others pass is not looked at: it need not even be possible to pickle it.
        result = world.broadcast_object(value if world.rank == root else lambda: None, root)
        assert result["from"] == root
        assert result["array"].tolist() == list(range(root))
        assert (result is value) == (world.rank == root)


def test_gather_to_every_rank(world: World) -> None:
    for root in range(world.size):
        result = world.gather("x" * world.rank, root)
        assert result == (["x" * rank for rank in range(world.size)] if world.rank == root else None)


def test_allgather_of_unequal_objects(world: World) -> None:
    result = world.allgather([world.rank] * (10 * world.rank))
    assert result == [[rank] * (10 * rank) for rank in range(world.size)]


def test_large_objects(world: World) -> None:
    """5 MB: far beyond what any MPI sends without an answer from the receiver."""
    last = world.size - 1
    large = numpy.random.default_rng(0).bytes(5_000_000)
    mine = large if world.rank == last else None
    assert world.broadcast_object(mine, root=last) == large
    assert world.allgather(mine) == [None] * last + [large]


def test_a_large_message_around_the_ring(world: World) -> None:
    """5 MB from rank to rank."""
    array = numpy.arange(625_000.0)
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.rank == 0:
        world.send(array, following)
    received = world.recv(previous)
    assert received.tobytes() == (array + previous).tobytes()
    if world.rank:
        world.send(received + 1, following)


def test_messages_arrive_by_tag_and_in_order(world: World) -> None:
    """To every rank, this one too."""
    for to in range(world.size):
        for number in range(3):
            for tag in (0, 1, 31767):
                world.send((world.rank, tag, number), to, tag)
    for source in reversed(range(world.size)):
        for tag in (31767, 0, 1):
            for number in range(3):
                assert world.recv(source, tag) == (source, tag, number)


def test_a_message_to_oneself_is_a_copy(world: World) -> None:
    value = [numpy.zeros(200_000)]
    world.send(value, world.rank)
    value[0][:] = 1
    assert not world.recv(world.rank)[0].any()
    # Nobody else could send it, so waiting would never end.
    with pytest.raises(MismatchError, match="has sent itself nothing with tag 0"):
        world.recv(world.rank)


@pytest.mark.parametrize("wrong", [-1, "size", 10**6])
def test_ranks_that_do_not_exist(world: World, wrong: int | str) -> None:
    rank = world.size if wrong == "size" else int(wrong)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("root", lambda: world.broadcast(1.0, root=rank)),
        ("root", lambda: world.broadcast_object(1, root=rank)),
        ("root", lambda: world.gather(1, root=rank)),
        ("to", lambda: world.send(1, rank)),
        ("source", lambda: world.recv(rank)),
    ]
    for argument, call in calls:
        with pytest.raises(ValueError, match=f"{argument}={rank}; ranks are 0 to {world.size - 1}"):
            call()
    assert world.sum(1) == world.size


@pytest.mark.parametrize("tag", [-1, -999, 32768])
def test_tags_that_are_not_the_users(world: World, tag: int) -> None:
    with pytest.raises(ValueError, match=f"tag={tag}; tags are 0 to 31767"):
        world.send(1, 0, tag)
    with pytest.raises(ValueError, match=f"tag={tag}; tags are 0 to 31767"):
        world.recv(0, tag)
