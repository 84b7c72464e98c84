"""What is particular to the backend: one thread for all groups, comparison of calls, and how things end badly."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from mpitrain.errors import ConfigError, ProcessGroupError
from mpitrain.torch.channel import Channel
from tests.ranks.common import error_on_all, skip_alone

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def some(group: None) -> Iterator[Any]:
    """A group of all ranks that a test may break."""
    made = dist.new_group(timeout=timedelta(seconds=300))
    yield made
    dist.destroy_process_group(made)


def everyone(world: World, value: float) -> float:
    return sum(value + rank for rank in range(world.size))


def test_nobody_has_to_wait(world: World, some: Any) -> None:
    """The thread moves on what is in flight: futures and callbacks complete, one of them with a further call."""
    tensor, second = torch.tensor([float(world.rank)]), torch.tensor([2.0])
    seen: list[float] = []

    def further(future: Any) -> float:
        dist.all_reduce(second, group=some, async_op=True).get_future().then(lambda f: f.value()).wait()
        seen.append(future.value()[0].item())
        return float(second.item())

    future = dist.all_reduce(tensor, group=some, async_op=True).get_future().then(further)
    deadline = time.monotonic() + 300
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert future.value() == 2.0 * world.size
    assert seen == [everyone(world, 0)]


def test_closing_ends_what_was_dropped(world: World) -> None:
    made = dist.new_group()
    tensor = torch.full((70_000,), float(world.rank))
    dist.all_reduce(tensor, group=made, async_op=True)
    never = dist.irecv(torch.empty(1), (world.rank + 1) % world.size, group=made)
    dist.destroy_process_group(made)
    assert torch.equal(tensor, torch.full((70_000,), everyone(world, 0)))
    assert isinstance(never.exception(), ProcessGroupError)
    with pytest.raises(ProcessGroupError, match="destroyed"):
        made.allreduce([tensor], dist.AllreduceOptions())
    with pytest.raises(ValueError):
        dist.all_reduce(tensor, group=made)


def test_no_large_tensor_is_kept(world: World) -> None:
    """A large tensor is not kept either if it was only read, or if only a part of it was summed."""
    skip_alone(world)

    def used_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, each = used_bytes(), 2**24
    for _ in range(20):
        large = torch.ones(each // 4)
        parts = [torch.empty(each // 4) for _ in range(world.size)] if world.rank == 0 else None
        dist.gather(large, parts, async_op=True).wait()
        dist.all_reduce(large[:1], async_op=True).wait()
        del large, parts
    # Some buffers of MPI and of malloc stay. If each were kept, it would be 20 times `each` on every rank.
    assert used_bytes() - before < (10 + world.size) * each


def test_timeouts(world: World) -> None:
    """One rank makes the call; it names the call, the group and the time. A wait of the user's own breaks nothing."""
    skip_alone(world)
    made = dist.new_group(timeout=timedelta(seconds=1))
    late = torch.ones(1)
    if world.rank == 0:
        with pytest.raises(ProcessGroupError, match=r"recv from any rank.* 1 s"):
            dist.recv(torch.empty(1), group=made)
        with pytest.raises(ProcessGroupError, match=f"recv from {world.name(1)}.* 1 s"):
            dist.recv(torch.empty(1), 1, group=made)
        work = dist.all_reduce(late, async_op=True)
        with pytest.raises(ProcessGroupError, match=r"0\.05 s of wait"):
            work.wait(timedelta(seconds=0.05))
        with world.same_call("the work has not ended"):
            world.barrier()
        work.wait()
        with pytest.raises(ProcessGroupError, match=r"all_reduce of 1 float32 in process group .* after 1 s"):
            dist.all_reduce(torch.ones(1), group=made)
        with pytest.raises(Exception, match="can no longer communicate"):
            dist.all_reduce(torch.ones(1), group=made)
    else:
        with world.same_call("the work has not ended"):
            world.barrier()
        dist.all_reduce(late)
    assert late.item() == world.size
    dist.barrier()
    dist.destroy_process_group(made)
    channel = weakref.ref(made._channel)
    del made
    gc.collect()
    # What was broken off is kept: MPI may still write there.
    assert (channel() is not None) == (world.rank == 0)


def test_what_one_rank_broke_off_reaches_no_later_group(world: World) -> None:
    """The others give the group back; its messages, which are still under way to them, must not meet a new one's."""
    if world.size < 3:
        pytest.skip("needs a rank that leaves, and two that continue")
    made = dist.new_group(timeout=timedelta(seconds=1))
    if world.rank == 0:
        with pytest.raises(ProcessGroupError, match=r"after 1 s"):
            dist.all_reduce(torch.ones(1), group=made)
    dist.barrier()
    dist.destroy_process_group(made)
    others = list(range(1, world.size))
    groups = [dist.new_group(others) for _ in range(6)]
    for group in groups if world.rank else []:
        value = torch.full((3,), float(world.rank))
        dist.all_reduce(value, group=group)
        assert (value == sum(others)).all()
        dist.destroy_process_group(group)
    dist.barrier()


def test_a_forked_process(world: World) -> None:
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except ProcessGroupError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["collected", "begun"])
def test_an_exception_among_calls_that_end_together(world: World, device: torch.device | None) -> None:
    """The group works on: later calls are made, and kept no longer than others."""
    group: Any = dist.group.WORLD
    value, other = torch.ones(3), torch.full((2,), float(world.rank))
    manager = dist._coalescing_manager
    with pytest.raises(KeyError, match="a batch"), manager(device=device):
        if device is not None:
            dist.broadcast(other, world.size - 1)  # this one is begun at once
        dist.all_reduce(value)
        raise KeyError("a batch")
    kept = weakref.ref(other)
    assert (value.tolist(), group._together) == ([1] * 3, None)
    dist.all_reduce(value)
    assert value.tolist() == [world.size] * 3
    with manager(device=device):
        dist.all_reduce(value)
    assert value.tolist() == [world.size**2] * 3
    with manager(), pytest.raises(ValueError, match="non-empty op list"):
        dist.all_reduce(value)
        with manager():
            pass
    assert value.tolist() == [world.size**3] * 3
    del other
    assert kept() is None


def test_a_refusal_that_was_caught_does_not_come_again(world: World) -> None:
    """The last rank comes later, so the others end the group while they still tell of their refusals."""
    made = dist.new_group()
    time.sleep(0.2 * (world.rank == world.size - 1))
    with pytest.raises(ValueError, match="give one for each rank"):
        dist.all_gather([torch.ones(3)] * (world.size + 1), torch.ones(3), group=made)
    dist.destroy_process_group(made)


def test_exact_sums_are_refused(world: World) -> None:
    there = world.replaced(config=replace(world.config, reduction="exact"))
    engine: Any = None  # it is not reached
    text = error_on_all(world, ConfigError, lambda: Channel(engine, there, "default", 1.0))
    assert text.startswith("reduction=exact: the calls of torch.distributed add up as the algorithm does")


def test_mpi_loses_a_rank_while_a_call_is_in_flight(world: World, some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends the calls with MPI's error, which their caller gets, and continues with other groups."""
    skip_alone(world)

    def revoked() -> None:
        raise RuntimeError("MPI_ERR_REVOKED")

    tensor = torch.zeros(1)
    work = dist.irecv(tensor, (world.rank + 1) % world.size, group=some)
    with monkeypatch.context() as patch:
        patch.setattr(world.control.notes, "look", revoked)
        while not work.is_completed():
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="MPI_ERR_REVOKED"):
            work.wait()
    world.barrier()
    other = dist.new_group()
    dist.all_reduce(tensor.fill_(world.rank), group=other, async_op=True).get_future().wait()
    assert tensor.item() == everyone(world, 0)
    dist.destroy_process_group(other)
