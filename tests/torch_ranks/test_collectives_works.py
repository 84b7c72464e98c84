"""The works and futures of torch.distributed: they end in any order, also if nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from tests.torch_ranks.common import LONG, assert_equal, expected, pattern, reduce_scatter_single, tensor

pytestmark = pytest.mark.usefixtures("group")


def test_barrier(world: World, shared: Any) -> None:
    for turn in range(3):
        (shared / f"{turn} {world.rank}").touch()
        dist.barrier()
        assert len(list(shared.glob(f"{turn} *"))) == world.size
    work = dist.barrier(async_op=True)
    work.wait()


def test_works_are_waited_for_in_any_order(world: World) -> None:
    everybody = range(world.size)
    sums = [tensor(1000, torch.float32, world.rank, salt) for salt in range(6)]
    works = [dist.all_reduce(one, async_op=True) for one in sums]
    gathered = [torch.empty(5) for _ in everybody]
    late = dist.all_gather(gathered, tensor(5, torch.float32, world.rank), async_op=True)
    from_root = tensor(5, torch.float32, world.rank)
    broadcast = dist.broadcast(from_root, 0, async_op=True)
    order = range(6) if world.rank % 2 else reversed(range(6))
    for number in order:
        assert works[number].wait()
        assert works[number].is_completed()
        assert_equal(sums[number], expected([pattern(1000, rank, number) for rank in everybody], numpy.add))
    broadcast.wait()
    late.wait()
    assert_equal(from_root, torch.from_numpy(pattern(5, 0)))
    for rank in everybody:
        assert_equal(gathered[rank], torch.from_numpy(pattern(5, rank)))


def test_futures(world: World) -> None:
    total = expected([pattern(10, rank) for rank in range(world.size)], numpy.add)
    mine = tensor(10, torch.float32, world.rank)
    future = dist.all_reduce(mine, async_op=True).get_future()
    halves = future.then(lambda done: done.value()[0] / 2)
    twice = halves.then(lambda done: done.value() * 4)
    assert_equal(twice.wait(), total * 2)
    assert_equal(future.value()[0], total)
    assert future.done()
    works = [dist.all_reduce(tensor(10, torch.float32, world.rank), async_op=True) for _ in range(3)]
    for values in torch.futures.collect_all([work.get_future() for work in works]).wait():
        assert_equal(values.value()[0], total)


def test_a_dropped_work_still_takes_part(world: World) -> None:
    kept = tensor(LONG, torch.float32, world.rank)
    if world.rank % 2:
        dist.all_reduce(kept, async_op=True)  # nobody waits
        dist.all_reduce(tensor(LONG, torch.float32, world.rank), async_op=True)  # nobody keeps the memory either
    else:
        dist.all_reduce(kept)
        dist.all_reduce(tensor(LONG, torch.float32, world.rank))
    dist.barrier()
    assert_equal(kept, expected([pattern(LONG, rank) for rank in range(world.size)], numpy.add))


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3), async_op=True),
    "broadcast": lambda: dist.broadcast(torch.ones(3), 0, async_op=True),
    "reduce": lambda: dist.reduce(torch.ones(3), 0, async_op=True),
    "all_gather": lambda: dist.all_gather(
        [torch.ones(3) for _ in range(dist.get_world_size())], torch.ones(3), async_op=True
    ),
    "reduce_scatter_single": lambda: reduce_scatter_single(
        torch.ones(3), torch.ones(3 * dist.get_world_size()), async_op=True
    ),
    "all_to_all_single": lambda: dist.all_to_all_single(
        torch.ones(dist.get_world_size()), torch.ones(dist.get_world_size()), async_op=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_gives_a_work(world: World, backend: str, name: str) -> None:
    work = CALLS[name]()
    assert work.wait()
    if backend == "gloo" and name == "reduce_scatter_single":
        return  # the work of gloo never says so
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
