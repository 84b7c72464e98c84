"""Some of the ranks: groups, in any order, made and destroyed."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from mpitrain.errors import MpitrainError
from mpitrain.torch.rendezvous import LateStore
from tests.ranks.common import skip_alone

from .common import assert_equal, tensor

pytestmark = pytest.mark.usefixtures("group")


def total_of(ranks: list[int], count: int = 10, salt: int = 0) -> torch.Tensor:
    return sum((tensor(count, torch.float32, rank, salt) for rank in ranks), torch.zeros(count))


def test_who_we_are(world: World) -> None:
    assert dist.get_rank() == world.rank
    assert dist.get_world_size() == world.size
    assert dist.get_backend() == "mpitrain"
    assert os.environ["RANK"] == str(world.rank)
    assert os.environ["WORLD_SIZE"] == str(world.size)
    assert os.environ["LOCAL_RANK"] == str(world.local_rank)
    assert os.environ["LOCAL_WORLD_SIZE"] == str(world.local_size)


def test_groups_used_in_different_orders(world: World) -> None:
    """Even ranks, odd ranks, all but the last, all again: each rank calls its own ones in its own order."""
    members = [
        list(range(0, world.size, 2)),
        list(range(1, world.size, 2)) or [0],
        list(range(max(world.size - 1, 1))),
        list(range(world.size)),
    ]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [number for number, ranks in enumerate(members) if world.rank in ranks]
    sums = {number: tensor(10, torch.float32, world.rank, salt=number) for number in mine}
    order = mine if world.rank % 2 else mine[::-1]
    works = {number: dist.all_reduce(sums[number], group=groups[number], async_op=True) for number in order}
    for number in mine:
        works[number].wait()
        assert_equal(sums[number], total_of(members[number], salt=number), number)
        assert dist.get_rank(groups[number]) == members[number].index(world.rank)
        assert dist.get_world_size(groups[number]) == len(members[number])
    for number in mine:
        last = members[number][-1]
        value = tensor(3, torch.float32, world.rank)
        dist.broadcast(value, last, group=groups[number])
        assert_equal(value, tensor(3, torch.float32, last))
        parts = [torch.empty(2) for _ in members[number]]
        dist.all_gather(parts, tensor(2, torch.float32, world.rank), group=groups[number])
        for rank, part in zip(members[number], parts, strict=True):
            assert_equal(part, tensor(2, torch.float32, rank))
    for number in mine:
        dist.destroy_process_group(groups[number])
    dist.barrier()


def test_groups_of_some_ranks(world: World) -> None:
    """Which only its members make, those that divide all ranks, and halves."""
    skip_alone(world)
    ranks = list(range(world.size))[-2:]
    if world.rank in ranks:
        ours = dist.new_group(ranks, use_local_synchronization=True)
        value = tensor(10, torch.float32, world.rank)
        dist.all_reduce(value, group=ours)
        assert_equal(value, total_of(ranks))
        dist.destroy_process_group(ours)
    dist.barrier()
    halves = [list(range(world.size // 2)), list(range(world.size // 2, world.size))]
    ranks = halves[world.rank >= world.size // 2]
    # dist.split_group itself wants a GPU.
    mine = dist.group.WORLD.split_group(ranks)
    value = tensor(10, torch.float32, world.rank)
    mine.allreduce([value]).wait()
    assert_equal(value, total_of(ranks))
    assert (mine.rank(), mine.size()) == (ranks.index(world.rank), len(ranks))
    mine.shutdown()
    if world.size % 2 == 0:  # PyTorch wants groups of equal size
        mine, groups = dist.new_subgroups(2)
        value = tensor(10, torch.float32, world.rank)
        dist.all_reduce(value, group=mine)
        first = world.rank // 2 * 2
        assert_equal(value, total_of([first, first + 1]))
        assert len(groups) == world.size // 2
        dist.destroy_process_group(mine)
    dist.barrier()


def test_groups_made_and_destroyed(world: World) -> None:
    for turn in range(20):
        ours = dist.new_group()
        value = torch.tensor([float(turn)])
        dist.all_reduce(value, group=ours)
        assert value.item() == turn * world.size
        dist.destroy_process_group(ours)
    for _ in range(2):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            dist.all_reduce(torch.ones(1))
        dist.init_process_group("mpitrain")
        value = torch.ones(3)
        dist.all_reduce(value)
        assert (value == world.size).all()


def test_the_way_to_the_store(world: World) -> None:
    """A rank on another host tries one address after the other. If none works, the error says what to do."""
    soon = timedelta(seconds=5)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("here", "yes")
    far = LateStore(world, None, server.port, ["not an address", "127.0.0.1"], soon)
    assert dist.PrefixStore("h", far).check(["ere"]) is False
    assert far.get("here") == b"yes"
    closed = LateStore(world, None, 1, ["127.0.0.1"], soon)
    with pytest.raises(MpitrainError, match=r"127\.0\.0\.1: .*refused.* Open a port between the hosts"):
        closed.get("here")
