"""The calls of torch.distributed that move tensors and objects, or scatter parts of a sum; short forms of calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from mpitrain import World
from mpitrain.errors import MpitrainError

from .common import (
    FLOATS,
    INTEGERS,
    LONG,
    REDUCTIONS,
    all_gather_single,
    assert_equal,
    counts,
    expected,
    pattern,
    reduce_scatter_single,
    tensor,
)

pytestmark = pytest.mark.usefixtures("group")
SECONDS = timedelta(seconds=300)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.bool, torch.complex64], ids=str)
def test_what_only_moves(world: World, dtype: torch.dtype) -> None:
    """Broadcast, allgather, gather and scatter, from every root, of every length."""
    everybody = range(world.size)
    for count in counts(world):
        sent = tensor(count, dtype, world.rank)
        for root in everybody:
            received = sent.clone()
            assert dist.broadcast(received, root) is None
            assert_equal(received, tensor(count, dtype, root), (root, count))
        root = count % world.size
        gathered = [torch.empty(count, dtype=dtype) for _ in everybody]
        at_root = [torch.empty(count, dtype=dtype) for _ in everybody] if world.rank == root else None
        dist.all_gather(gathered, sent)
        dist.gather(sent, at_root, dst=root)
        for found in (gathered, at_root or []):
            for rank, part in enumerate(found):
                assert_equal(part, tensor(count, dtype, rank), (rank, count))
        mine = torch.empty(count, dtype=dtype)
        parts = [tensor(count, dtype, rank, salt=1) for rank in everybody] if world.rank == root else None
        dist.scatter(mine, parts, src=root)
        assert_equal(mine, tensor(count, dtype, world.rank, salt=1), count)


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced:FutureWarning")
def test_allgather(world: World) -> None:
    """Long tensors, one tensor for all, and rows of which each rank has another number, as NCCL takes them."""
    size = world.size
    for count in (0, 1, 6, LONG):
        mine, whole = tensor(count, torch.float32, world.rank), torch.empty(size * count)
        all_gather_single(whole, mine)
        wanted = torch.from_numpy(numpy.concatenate([pattern(count, rank) for rank in range(size)]))
        assert_equal(whole, wanted, count)
    stacked = torch.empty(size, 2, 3)
    all_gather_single(stacked, tensor(6, torch.float32, world.rank).view(2, 3))
    for rank in range(size):
        assert_equal(stacked[rank], torch.from_numpy(pattern(6, rank)).view(2, 3))
    # The input may lie in its place in the output, as in FSDP.
    whole = torch.empty(size * 5)
    place = whole[world.rank * 5 : (world.rank + 1) * 5]
    place.copy_(tensor(5, torch.float32, world.rank))
    all_gather_single(whole, place)
    assert_equal(whole, torch.from_numpy(numpy.concatenate([pattern(5, rank) for rank in range(size)])))
    # Rank r gives r rows.
    for rows in (lambda rank: rank, lambda rank: LONG):
        parts = [torch.empty(rows(rank), 2) for rank in range(size)]
        dist.all_gather(parts, tensor(2 * rows(world.rank), torch.float32, world.rank).view(-1, 2))
        for rank, part in enumerate(parts):
            assert_equal(part, torch.from_numpy(pattern(2 * rows(rank), rank)).view(-1, 2))
    # The output of each rank is a list with a tensor for each input, also if there are as many inputs as ranks.
    for lengths in ((3, 1, 11), (4,) * size):
        own = [tensor(count, torch.float32, world.rank, salt) for salt, count in enumerate(lengths)]
        outputs = [[torch.empty(count) for count in lengths] for _ in range(size)]
        dist.all_gather_coalesced(outputs, own)
        for rank, of_rank in enumerate(outputs):
            for salt, count in enumerate(lengths):
                assert_equal(of_rank[salt], tensor(count, torch.float32, rank, salt), (rank, salt))


def test_reduce_scatter(world: World) -> None:
    size = world.size
    for count in (0, 1, 6, LONG // size):
        whole = [pattern(count * size, rank) for rank in range(size)]
        mine = torch.from_numpy(whole[world.rank]).float()
        for op, function in (REDUCTIONS["sum"], REDUCTIONS["max"]):
            total = expected(whole, function)[world.rank * count : (world.rank + 1) * count]
            part, other = torch.empty(count), torch.empty(count)
            reduce_scatter_single(part, mine.clone(), op)
            dist.reduce_scatter(other, list(mine.clone().split(count)) if count else [mine] * size, op)
            assert_equal(part, total, count)
            assert_equal(other, total, count)
    # The result may lie in the input, as in FSDP.
    mine = tensor(5 * size, torch.float32, world.rank)
    part = mine[world.rank * 5 : (world.rank + 1) * 5]
    reduce_scatter_single(part, mine)
    total = expected([pattern(5 * size, rank) for rank in range(size)], numpy.add)
    assert_equal(part, total[world.rank * 5 : (world.rank + 1) * 5])
    uneven = torch.empty(world.rank)
    dist.reduce_scatter(uneven, [tensor(rank, torch.float32, world.rank, salt=rank) for rank in range(size)])
    wanted = [pattern(world.rank, rank, salt=world.rank) for rank in range(size)]
    assert_equal(uneven, expected(wanted, numpy.add))


def test_alltoall(world: World) -> None:
    size, rank = world.size, world.rank
    # Rank r sends r + s items of two numbers to rank s. Rank 0 sends none to itself.
    lengths = [rank + other for other in range(size)]
    mine = torch.cat([tensor(2 * (rank + other), torch.float32, rank, salt=other).view(-1, 2) for other in range(size)])
    received = torch.empty(sum(lengths), 2)
    dist.all_to_all_single(received, mine, lengths, lengths)
    for other, part in enumerate(received.split(lengths)):
        assert_equal(part, tensor(2 * lengths[other], torch.float32, other, salt=rank).view(-1, 2))
    # Lists of tensors of different shapes.
    for length in (lambda sender, receiver: sender + 2 * receiver, lambda *_: LONG):
        incoming = [torch.empty(length(other, rank)) for other in range(size)]
        dist.all_to_all(
            incoming, [tensor(length(rank, other), torch.float32, rank, salt=other) for other in range(size)]
        )
        for other, part in enumerate(incoming):
            assert_equal(part, tensor(length(other, rank), torch.float32, other, salt=rank))
    # In even parts. A call in place must not overwrite what is still to be sent.
    for count, dtype in ((3, torch.int64), (LONG, torch.float32)):
        mine = torch.cat([tensor(count, dtype, rank, salt=other) for other in range(size)])
        received = mine if count == LONG else torch.empty_like(mine)
        dist.all_to_all_single(received, mine)
        for other, part in enumerate(received.split(count)):
            assert_equal(part, tensor(count, dtype, other, salt=rank))


# -- Python objects --


def of_rank(rank: int) -> dict[str, Any]:
    """An object of another length on every rank."""
    return {"rank": rank, "text": "x" * (rank * 1000), "none": None}


def test_objects(world: World) -> None:
    everybody = range(world.size)
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, of_rank(world.rank))
    assert gathered == [of_rank(rank) for rank in everybody]
    for root in everybody:
        given: list[Any] = [of_rank(root), "two"] if world.rank == root else [None, None]
        dist.broadcast_object_list(given, root)
        assert given == [of_rank(root), "two"]
        to_root: list[Any] | None = [None] * world.size if world.rank == root else None
        dist.gather_object(of_rank(world.rank), to_root, root)
        assert to_root == ([of_rank(rank) for rank in everybody] if world.rank == root else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [of_rank(rank + 1) for rank in everybody] if world.rank == root else None, root)
        assert mine == [of_rank(world.rank + 1)]
    if world.is_root:
        for rank in range(1, world.size):
            dist.send_object_list([of_rank(rank), torch.arange(rank)], rank)
    else:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, 0) == 0
        assert received[0] == of_rank(world.rank)
        assert torch.equal(received[1], torch.arange(world.rank))


# -- with one tensor instead of a list, and without an object of options, as gloo has them --


def of(rank: int, count: int = 5, salt: int = 0) -> torch.Tensor:
    return tensor(count, torch.float32, rank, salt)


def total_of(world: World, count: int = 5, salt: int = 0) -> torch.Tensor:
    return sum((of(rank, count, salt) for rank in range(world.size)), torch.zeros(count))


@pytest.mark.parametrize("listed", [False, True])
def test_short_allreduce(world: World, listed: bool) -> None:
    """A matrix can be taken for a list of its rows."""
    group: Any = dist.group.WORLD
    total, largest = of(world.rank), of(world.rank)
    group.allreduce([total] if listed else total).wait()
    group.allreduce([largest] if listed else largest, dist.ReduceOp.MAX, *([SECONDS] if listed else [])).wait()
    assert_equal(total, total_of(world))
    assert_equal(largest, torch.stack([of(rank) for rank in range(world.size)]).amax(0))
    for num_rows in (0, 1, 3):
        matrix = of(world.rank, 4 * num_rows).view(num_rows, 4)
        group.allreduce(matrix, op=dist.ReduceOp.SUM, timeout=SECONDS).wait()
        assert_equal(matrix, total_of(world, 4 * num_rows).view(num_rows, 4))


def test_short_forms(world: World) -> None:
    group: Any = dist.group.WORLD
    last, is_last, everybody = world.size - 1, world.rank == world.size - 1, range(world.size)
    sent, total, smallest, part, scattered = of(world.rank), of(world.rank), of(world.rank), torch.empty(5), of(0)
    gathered, at_root = ([torch.empty(5) for _ in everybody] for _ in range(2))
    group.broadcast(sent, last).wait()
    group.reduce(total, last).wait()
    group.reduce(smallest, root=last, op=dist.ReduceOp.MIN, timeout=SECONDS).wait()
    group.allgather(gathered, of(world.rank)).wait()
    group.gather(at_root if is_last else [], of(world.rank), last, SECONDS).wait()
    group.scatter(part, [of(rank) for rank in everybody] if is_last else [], last).wait()
    group.reduce_scatter(scattered, [of(world.rank, salt=rank) for rank in everybody]).wait()
    assert_equal(sent, of(last))
    assert_equal(part, of(world.rank))
    assert_equal(scattered, total_of(world, salt=world.rank))
    for found in (gathered, at_root) if is_last else (gathered,):
        for rank in everybody:
            assert_equal(found[rank], of(rank))
    if is_last:
        assert_equal(total, total_of(world))
        assert_equal(smallest, torch.stack([of(rank) for rank in everybody]).amin(0))
    calls = [getattr(group, name, None) for name in ("all_to_all_single", "alltoall_base")]
    assert any(calls)
    for call in filter(None, calls):
        received = torch.empty(world.size)
        call(received, torch.arange(world.size) + 10.0 * world.rank, [], [], SECONDS).wait()
        assert_equal(received, world.rank + 10.0 * torch.arange(world.size))
    group.barrier(SECONDS).wait()
    group.barrier(timeout=SECONDS).wait()


def test_the_timeout_of_a_call_the_number_of_calls_and_options(world: World) -> None:
    some = dist.new_group(timeout=SECONDS)
    options = some._get_backend(torch.device("cpu")).options
    assert (options._timeout, options.backend) == (SECONDS, "mpitrain")
    first = some._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=some)
    work = dist.barrier(some, async_op=True)
    assert some._get_sequence_number_for_group() - first == 4
    work.wait()
    if world.is_root and world.size > 1:
        with pytest.raises(MpitrainError, match=r"(?i)tim(ed |e)out"):
            some.allreduce(torch.ones(2), dist.ReduceOp.SUM, timedelta(seconds=0.5)).wait()
    world.barrier()
    dist.destroy_process_group(some)
    world.barrier()
