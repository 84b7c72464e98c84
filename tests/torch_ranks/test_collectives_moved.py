"""The collectives of torch.distributed that move tensors, or scatter parts of a sum."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mpitrain import World
from tests.torch_ranks.common import (
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


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced:FutureWarning")
@pytest.mark.parametrize("lengths", [(3, 1, 11), (4, 4), (4, 4, 4)], ids=str)
def test_gathered_together(world: World, lengths: tuple[int, ...]) -> None:
    """The output of each rank is a list with a tensor for each input, also if there are as many inputs as ranks."""
    own = [tensor(count, torch.float32, world.rank, salt) for salt, count in enumerate(lengths)]
    outputs = [[torch.empty(count) for count in lengths] for _ in range(world.size)]
    dist.all_gather_coalesced(outputs, own)
    for rank, of_rank in enumerate(outputs):
        for salt, count in enumerate(lengths):
            assert_equal(of_rank[salt], tensor(count, torch.float32, rank, salt), (rank, salt))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.bool, torch.complex64], ids=str)
def test_what_only_moves(world: World, backend: str, dtype: torch.dtype) -> None:
    """Broadcast, allgather, gather and scatter, from every root, of every length."""
    if backend == "gloo" and dtype == torch.int16:
        pytest.skip("gloo has no int16")
    everybody = range(world.size)
    for count in counts(world):
        sent = tensor(count, dtype, world.rank)
        for root in everybody:
            received = sent.clone()
            assert dist.broadcast(received, root) is None
            assert_equal(received, tensor(count, dtype, root), (root, count))
        parts = [torch.empty(count, dtype=dtype) for _ in everybody]
        dist.all_gather(parts, sent)
        for rank, part in enumerate(parts):
            assert_equal(part, tensor(count, dtype, rank), (rank, count))
        if backend == "gloo" and dtype.is_complex:
            continue
        root = count % world.size
        parts = [torch.empty(count, dtype=dtype) for _ in everybody] if world.rank == root else None
        dist.gather(sent, parts, dst=root)
        for rank, part in enumerate(parts or []):
            assert_equal(part, tensor(count, dtype, rank), (rank, count))
        ours = torch.empty(count, dtype=dtype)
        parts = [tensor(count, dtype, rank, salt=1) for rank in everybody] if world.rank == root else None
        dist.scatter(ours, parts, src=root)
        assert_equal(ours, tensor(count, dtype, world.rank, salt=1), count)


def test_allgather_of_long_and_uneven_tensors(world: World, ours: None) -> None:
    parts = [torch.empty(LONG) for _ in range(world.size)]
    dist.all_gather(parts, tensor(LONG, torch.float32, world.rank))
    for rank, part in enumerate(parts):
        assert_equal(part, torch.from_numpy(pattern(LONG, rank)))
    # As with NCCL, the ranks may give different lengths. Rank r gives r rows.
    parts = [torch.empty(rank, 2) for rank in range(world.size)]
    dist.all_gather(parts, tensor(2 * world.rank, torch.float32, world.rank).view(-1, 2))
    for rank, part in enumerate(parts):
        assert_equal(part, torch.from_numpy(pattern(2 * rank, rank)).view(-1, 2))


def test_allgather_into_one_tensor(world: World, backend: str) -> None:
    size = world.size
    for count in (0, 1, 6, LONG):
        mine = tensor(count, torch.float32, world.rank)
        whole = torch.empty(size * count)
        all_gather_single(whole, mine)
        wanted = torch.from_numpy(numpy.concatenate([pattern(count, rank) for rank in range(size)]))
        assert_equal(whole, wanted, count)
    if backend != "gloo":  # gloo takes only the other form
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


def test_reduce_scatter(world: World) -> None:
    size = world.size
    for count in (0, 1, 6, LONG // size):
        whole = [pattern(count * size, rank) for rank in range(size)]
        mine = torch.from_numpy(whole[world.rank]).float()
        for op, function in (REDUCTIONS["sum"], REDUCTIONS["max"]):
            total = expected(whole, function)[world.rank * count : (world.rank + 1) * count]
            part = torch.empty(count)
            reduce_scatter_single(part, mine.clone(), op)
            assert_equal(part, total, count)
            part = torch.empty(count)
            dist.reduce_scatter(part, list(mine.clone().split(count)) if count else [mine] * size, op)
            assert_equal(part, total, count)
    # The result may lie in the input, as in FSDP.
    mine = tensor(5 * size, torch.float32, world.rank)
    part = mine[world.rank * 5 : (world.rank + 1) * 5]
    reduce_scatter_single(part, mine)
    total = expected([pattern(5 * size, rank) for rank in range(size)], numpy.add)
    assert_equal(part, total[world.rank * 5 : (world.rank + 1) * 5])


def test_reduce_scatter_of_averages_and_uneven_parts(world: World, ours: None) -> None:
    size = world.size
    part = torch.empty(4)
    reduce_scatter_single(part, tensor(4 * size, torch.float32, world.rank), ReduceOp.AVG)
    mean = numpy.mean([pattern(4 * size, rank) for rank in range(size)], axis=0)[world.rank * 4 : world.rank * 4 + 4]
    assert torch.allclose(part.double(), torch.from_numpy(mean), rtol=1e-6)
    uneven = torch.empty(world.rank)
    dist.reduce_scatter(uneven, [tensor(rank, torch.float32, world.rank, salt=rank) for rank in range(size)])
    wanted = [pattern(world.rank, rank, salt=world.rank) for rank in range(size)]
    assert_equal(uneven, expected(wanted, numpy.add))


def test_alltoall(world: World, backend: str) -> None:
    size, rank = world.size, world.rank
    # A single tensor in even parts.
    mine = torch.cat([tensor(3, torch.int64, rank, salt=other) for other in range(size)])
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    for other in range(size):
        assert_equal(received[3 * other : 3 * other + 3], tensor(3, torch.int64, other, salt=rank))
    # Rank r sends r + s items of two numbers to rank s. Rank 0 sends none to itself.
    lengths = [rank + other for other in range(size)]
    mine = torch.cat([tensor(2 * (rank + other), torch.float32, rank, salt=other).view(-1, 2) for other in range(size)])
    received = torch.empty(sum(lengths), 2)
    dist.all_to_all_single(received, mine, lengths, lengths)
    for other, part in enumerate(received.split(lengths)):
        assert_equal(part, tensor(2 * lengths[other], torch.float32, other, salt=rank).view(-1, 2))
    if backend == "gloo":
        return
    # The call is in place, and must not overwrite what is still to be sent.
    mine = torch.cat([tensor(LONG, torch.float32, rank, salt=other) for other in range(size)])
    dist.all_to_all_single(mine, mine)
    for other, part in enumerate(mine.split(LONG)):
        assert_equal(part, tensor(LONG, torch.float32, other, salt=rank))
    # A list of tensors of different shapes.
    outgoing = [tensor(rank + 2 * other, torch.float32, rank, salt=other) for other in range(size)]
    incoming = [torch.empty(other + 2 * rank) for other in range(size)]
    dist.all_to_all(incoming, outgoing)
    for other in range(size):
        assert_equal(incoming[other], tensor(other + 2 * rank, torch.float32, other, salt=rank))
    outgoing = [tensor(LONG, torch.float32, rank, salt=other) for other in range(size)]
    incoming = [torch.empty(LONG) for _ in range(size)]
    dist.all_to_all(incoming, outgoing)
    for other in range(size):
        assert_equal(incoming[other], tensor(LONG, torch.float32, other, salt=rank))
