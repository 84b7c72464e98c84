"""Messages between two ranks of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from mpitrain.errors import ProcessGroupError

from .common import FLOATS, INTEGERS, assert_equal, tensor

pytestmark = pytest.mark.usefixtures("group", "several")


def neighbours(world: World) -> tuple[int, int]:
    """Left and right in the ring."""
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


def test_send_and_receive(world: World) -> None:
    left, right = neighbours(world)
    for dtype in [*INTEGERS, *FLOATS, torch.bool, torch.complex64]:
        for count in (0, 1, 10):
            received = torch.empty(count, dtype=dtype)
            if world.rank == 0:
                dist.send(tensor(count, dtype, 0), right)
                assert dist.recv(received, left) == left
            else:
                assert dist.recv(received, left) == left
                dist.send(tensor(count, dtype, world.rank), right)
            assert_equal(received, tensor(count, dtype, left), (dtype, count))


def test_long_messages_tags_and_their_order(world: World) -> None:
    """In a ring: a long one, three tags that are received in another order, and five of one tag."""
    left, right = neighbours(world)
    count = 300_001
    received = torch.empty(count)
    works = [dist.isend(tensor(count, torch.float32, world.rank), right), dist.irecv(received, left)]
    for work in works:
        work.wait()
        assert work.is_completed()
    assert_equal(received, tensor(count, torch.float32, left))
    works = [dist.isend(tensor(4, torch.float32, world.rank, salt=tag), right, tag=tag) for tag in (3, 1, 2)]
    for tag in (1, 2, 3):
        received = torch.empty(4)
        dist.recv(received, left, tag=tag)
        assert_equal(received, tensor(4, torch.float32, left, salt=tag))
    several = [torch.empty(4) for _ in range(5)]
    works += [dist.irecv(one, left) for one in several]
    works += [dist.isend(tensor(4, torch.float32, world.rank, salt=number), right) for number in range(5)]
    for work in reversed(works):
        work.wait()
    for number, one in enumerate(several):
        assert_equal(one, tensor(4, torch.float32, left, salt=number))


def test_from_any_source(world: World) -> None:
    if world.rank:
        dist.send(tensor(3, torch.int64, world.rank), 0, tag=5)
        dist.send(tensor(3, torch.int64, world.rank, salt=1), 0, tag=6)
        return
    for tag, salt in ((5, 0), (6, 1)):
        sources = []
        for _ in range(world.size - 1):
            received = torch.empty(3, dtype=torch.int64)
            source = dist.recv(received, tag=tag)
            assert_equal(received, tensor(3, torch.int64, source, salt))
            sources.append(source)
        assert sorted(sources) == list(range(1, world.size))


def test_between_collectives(world: World) -> None:
    """A message that is on its way meets no collective, whatever order ranks wait in."""
    left, right = neighbours(world)
    received = torch.empty(10)
    receive = dist.irecv(received, left) if world.rank % 2 else None
    send = dist.isend(tensor(10, torch.float32, world.rank), right)
    total = torch.ones(5)
    dist.all_reduce(total)
    receive = receive or dist.irecv(received, left)
    receive.wait()
    send.wait()
    assert_equal(received, tensor(10, torch.float32, left))
    assert (total == world.size).all()


def test_batches(world: World) -> None:
    left, right = neighbours(world)
    received = [torch.empty(6), torch.empty(7, dtype=torch.int32)]
    operations = [
        dist.P2POp(dist.irecv, received[0], left),
        dist.P2POp(dist.isend, tensor(6, torch.float32, world.rank), right),
        dist.P2POp(dist.isend, tensor(7, torch.int32, world.rank), left, tag=1),
        dist.P2POp(dist.irecv, received[1], right, tag=1),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_equal(received[0], tensor(6, torch.float32, left))
    assert_equal(received[1], tensor(7, torch.int32, right))


def test_within_a_smaller_group(world: World) -> None:
    """Ranks are those of the job, unless given as those of the group."""
    last = dist.new_group([world.size - 1, 0])
    received = torch.empty(2)
    if world.rank == world.size - 1:
        dist.send(torch.tensor([1.0, 2.0]), 0, group=last)
        assert dist.recv(received, group=last, group_src=0) == 0
        assert received.tolist() == [3.0, 4.0]
    elif world.rank == 0:
        assert dist.recv(received, world.size - 1, group=last) == world.size - 1
        assert received.tolist() == [1.0, 2.0]
        dist.send(torch.tensor([3.0, 4.0]), group=last, group_dst=1)
    dist.barrier()
    if world.rank in (0, world.size - 1):
        dist.destroy_process_group(last)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_end_of_a_coalescing_manager_waits(world: World, device: torch.device | None, asynchronous: bool) -> None:
    sent, received = tensor(4000, torch.float64, world.rank), torch.zeros(4000, dtype=torch.float64)
    before, after = neighbours(world)
    with dist._coalescing_manager(device=device, async_ops=asynchronous) as works:
        dist.irecv(received, before)
        world.barrier()  # so no message is there yet
        dist.isend(sent, after)
    if asynchronous:
        works.wait()
    assert_equal(received, tensor(4000, torch.float64, before))


def test_the_profiler_sees_waits(world: World) -> None:
    """Rank 1 sends when a short wait of rank 0 is over."""
    value = torch.zeros(1)
    if world.rank == 0:
        work = dist.irecv(value, 1)
        assert work is not None
        too_short = pytest.raises(ProcessGroupError, match="has not ended within")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, too_short:
            work.wait(timedelta(seconds=0.01))
        waits = [event.count for event in profile.key_averages() if event.key == f"mpitrain:recv from {world.name(1)}"]
        assert waits == [1]
    world.barrier()
    if world.rank == 1:
        dist.send(torch.ones(1), 0)
    if world.rank == 0:
        assert work.wait()
        assert value.item() == 1
