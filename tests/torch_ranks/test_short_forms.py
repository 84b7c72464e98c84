"""The methods of a group with one tensor instead of a list, and without an object of options, as gloo has them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from mpitrain.errors import MpitrainError
from tests.ranks.common import skip_alone
from tests.torch_ranks.common import assert_equal, tensor

pytestmark = pytest.mark.usefixtures("group")
LONG = timedelta(seconds=300)


def of(rank: int, count: int = 5, salt: int = 0) -> torch.Tensor:
    return tensor(count, torch.float32, rank, salt)


def of_all(world: World, count: int = 5) -> list[torch.Tensor]:
    return [of(rank, count) for rank in range(world.size)]


def ours() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_allreduce(world: World, listed: bool, timed: bool) -> None:
    total, largest = of(world.rank), of(world.rank)
    ours().allreduce([total] if listed else total).wait()
    more = (LONG,) if timed else ()
    ours().allreduce([largest] if listed else largest, dist.ReduceOp.MAX, *more).wait()
    assert_equal(total, sum(of_all(world), torch.zeros(5)))
    assert_equal(largest, torch.stack(of_all(world)).amax(0))


def test_allreduce_of_a_matrix_is_of_all_its_rows(world: World) -> None:
    """A matrix can be taken for a list of its rows."""
    for num_rows in (0, 1, 3):
        matrix = of(world.rank, 4 * num_rows).view(num_rows, 4)
        ours().allreduce(matrix, op=dist.ReduceOp.SUM, timeout=LONG).wait()
        assert_equal(matrix, sum(of_all(world, 4 * num_rows), torch.zeros(4 * num_rows)).view(num_rows, 4))


def test_a_root(world: World) -> None:
    last = world.size - 1
    sent, total, smallest = of(world.rank), of(world.rank), of(world.rank)
    ours().broadcast(sent, last).wait()
    ours().reduce(total, last).wait()
    ours().reduce(smallest, root=last, op=dist.ReduceOp.MIN, timeout=LONG).wait()
    assert_equal(sent, of(last))
    if world.rank == last:
        assert_equal(total, sum(of_all(world), torch.zeros(5)))
        assert_equal(smallest, torch.stack(of_all(world)).amin(0))


def test_lists_for_the_ranks(world: World) -> None:
    last = world.size - 1
    gathered, at_root = ([torch.empty(5) for _ in range(world.size)] for _ in range(2))
    ours().allgather(gathered, of(world.rank)).wait()
    ours().gather(at_root if world.rank == last else [], of(world.rank), last, LONG).wait()
    part, total = torch.empty(5), torch.empty(5)
    ours().scatter(part, of_all(world) if world.rank == last else [], last).wait()
    ours().reduce_scatter(total, [of(world.rank, salt=rank) for rank in range(world.size)]).wait()
    for rank in range(world.size):
        assert_equal(gathered[rank], of(rank))
        assert_equal(at_root[rank], of(rank)) if world.rank == last else None
    assert_equal(part, of(world.rank))
    assert_equal(total, sum((of(rank, salt=world.rank) for rank in range(world.size)), torch.zeros(5)))


@pytest.mark.parametrize("name", ["all_to_all_single", "alltoall_base"])
def test_all_to_all_and_barrier(world: World, name: str) -> None:
    call: Callable[..., dist.Work] | None = getattr(ours(), name, None)
    if call is None:
        pytest.skip(f"this PyTorch has no {name}")
    received = torch.empty(world.size)
    call(received, torch.arange(world.size) + 10.0 * world.rank, [], [], LONG).wait()
    assert_equal(received, world.rank + 10.0 * torch.arange(world.size))
    ours().barrier(LONG).wait()
    ours().barrier(timeout=LONG).wait()


def test_the_timeout_is_that_of_the_call(world: World, backend: str) -> None:
    skip_alone(world)
    some = dist.new_group()
    if world.rank == 0:
        with pytest.raises((MpitrainError, RuntimeError), match=r"(?i)tim(ed |e)out"):
            some.allreduce(torch.ones(2), dist.ReduceOp.SUM, timedelta(seconds=0.5)).wait()
    world.barrier()
    if backend == "mpitrain":
        dist.destroy_process_group(some)
    world.barrier()


def test_the_number_of_calls(world: World) -> None:
    some = dist.new_group()
    first = some._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=some)
    work = dist.barrier(some, async_op=True)
    assert some._get_sequence_number_for_group() - first == 4
    work.wait()
    dist.destroy_process_group(some)


def test_options(backend: str) -> None:
    some = dist.new_group(timeout=LONG)
    options = some._get_backend(torch.device("cpu")).options
    assert options._timeout == LONG
    assert options.backend == backend
    dist.destroy_process_group(some)
