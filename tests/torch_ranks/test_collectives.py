"""Every collective of torch.distributed: values, dtypes, lengths, and who gets what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mpitrain import World
from tests.torch_ranks.common import (
    BITWISE,
    FLOATS,
    INTEGERS,
    REDUCTIONS,
    all_gather_single,
    assert_equal,
    expected,
    factors,
    pattern,
    reduce_scatter_single,
    tensor,
)

pytestmark = pytest.mark.usefixtures("group")

LONG = 100_003  # as float32 more than one piece of 256 KiB, and not divisible


def counts(world: World) -> list[int]:
    """Nothing, one, fewer than ranks, and a number that does not divide."""
    return [0, 1, world.size - 1, 7 * world.size + 3]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_allreduce(world: World, backend: str, dtype: torch.dtype) -> None:
    if backend == "gloo" and dtype == torch.int16:
        pytest.skip("gloo has no int16")
    operations = REDUCTIONS | (BITWISE if not dtype.is_floating_point else {})
    for count in counts(world):
        for name, (op, function) in operations.items():
            make = factors if name == "product" else pattern
            mine = torch.from_numpy(make(count, world.rank)).to(dtype)
            assert dist.all_reduce(mine, op) is None
            assert_equal(mine, expected([make(count, rank) for rank in range(world.size)], function), (name, count))


def test_allreduce_of_other_kinds(world: World, backend: str) -> None:
    everybody = range(world.size)
    total = expected([pattern(LONG, rank) for rank in everybody], numpy.add)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        mine = tensor(LONG, dtype, world.rank)
        dist.all_reduce(mine)
        assert_equal(mine, total, dtype)
    scalar = torch.tensor(world.rank + 1.5)
    dist.all_reduce(scalar)
    assert scalar.item() == sum(rank + 1.5 for rank in everybody)
    complex_sum = torch.complex(tensor(5, torch.float32, world.rank), tensor(5, torch.float32, world.rank, salt=1))
    dist.all_reduce(complex_sum)
    parts = [expected([pattern(5, rank, salt) for rank in everybody], numpy.add).float() for salt in (0, 1)]
    assert_equal(complex_sum, torch.complex(*parts))
    flags = torch.tensor([world.rank == 0, True, False])
    dist.all_reduce(flags, ReduceOp.MAX)
    assert flags.tolist() == [True, True, False]
    flags = torch.tensor([world.rank == 0, True, False])
    dist.all_reduce(flags, ReduceOp.MIN)
    assert flags.tolist() == [world.size == 1, True, False]


def test_what_is_not_finite(world: World) -> None:
    mine = torch.tensor([float("inf"), 1.0, 1.0 if world.rank else float("nan")])
    dist.all_reduce(mine)
    assert mine[0] == float("inf")
    assert mine[1] == world.size
    assert mine[2].isnan()


@pytest.mark.parametrize("strided", [False, True])
def test_layouts_of_memory(world: World, strided: bool, ours: None) -> None:
    """Tensors that are not contiguous: what lies between their elements stays as it is."""
    total = expected([pattern(15, rank) for rank in range(world.size)], numpy.add)
    if strided:
        whole = torch.full((30,), -1.0)
        view = whole[::2]
        view.copy_(tensor(15, torch.float32, world.rank))
    else:
        whole = view = torch.empty(3, 5).t()
        view.copy_(tensor(15, torch.float32, world.rank).view(5, 3))
        total = total.view(5, 3)
    dist.all_reduce(view)
    assert_equal(view, total)
    if strided:
        assert (whole[1::2] == -1).all()
    dist.broadcast(view, world.size - 1)
    assert_equal(view, total)
    gathered = [torch.empty(view.shape).t().contiguous().t() for _ in range(world.size)]
    dist.all_gather(gathered, view + world.rank)
    for rank, part in enumerate(gathered):
        assert_equal(part, total + rank)
    # Memory that overlaps itself is read as it looks.
    wide = torch.tensor([float(world.rank)]).expand(4)
    single = torch.empty(4 * world.size)
    all_gather_single(single, wide)
    assert single.tolist() == [rank for rank in range(world.size) for _ in range(4)]


def test_allreduce_of_views_and_parameters(world: World) -> None:
    whole = tensor(50, torch.float32, world.rank)
    dist.all_reduce(whole[10:20])
    assert_equal(whole[:10], torch.from_numpy(pattern(50, world.rank))[:10])
    assert_equal(whole[10:20], expected([pattern(50, rank) for rank in range(world.size)], numpy.add)[10:20])
    assert_equal(whole[20:], torch.from_numpy(pattern(50, world.rank))[20:])
    parameter = torch.nn.Parameter(torch.full((2, 3), float(world.rank)))
    dist.all_reduce(parameter.data)
    dist.broadcast(parameter.detach(), 0)
    assert (parameter == sum(range(world.size))).all()


def test_coalesced(world: World) -> None:
    """As torch does it in one call: several tensors, each as if alone."""
    lengths = (3, 0, 11)
    mine = [tensor(count, torch.float32, world.rank, salt) for salt, count in enumerate(lengths)]
    with dist._coalescing_manager():
        for one in mine:
            dist.all_reduce(one)
    for salt, count in enumerate(lengths):
        assert_equal(mine[salt], expected([pattern(count, rank, salt) for rank in range(world.size)], numpy.add))
    group = dist.group.WORLD
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = ReduceOp.MAX
    group.allreduce_coalesced(mine, options).wait()
    gathered = [torch.empty(world.size * (salt + 1)) for salt in range(2)]
    scattered = [torch.empty(salt + 1) for salt in range(2)]
    with dist._coalescing_manager(async_ops=True) as works:
        for salt in range(2):
            all_gather_single(gathered[salt], tensor(salt + 1, torch.float32, world.rank, salt))
    works.wait()
    with dist._coalescing_manager(async_ops=True) as works:
        for salt in range(2):
            whole = tensor(world.size * (salt + 1), torch.float32, world.rank, salt)
            reduce_scatter_single(scattered[salt], whole)
    works.wait()
    for salt in range(2):
        count = salt + 1
        wanted = numpy.concatenate([pattern(count, rank, salt) for rank in range(world.size)])
        assert_equal(gathered[salt], torch.from_numpy(wanted))
        total = expected([pattern(world.size * count, rank, salt) for rank in range(world.size)], numpy.add)
        assert_equal(scattered[salt], total[world.rank * count : (world.rank + 1) * count])


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced:FutureWarning")
@pytest.mark.parametrize("lengths", [(3, 1, 11), (4, 4), (4, 4, 4)], ids=str)
def test_gathered_together(world: World, lengths: tuple[int, ...]) -> None:
    """Outputs are lists by rank, of a tensor for each input; as many inputs as ranks, all of one shape, too."""
    own = [tensor(count, torch.float32, world.rank, salt) for salt, count in enumerate(lengths)]
    outputs = [[torch.empty(count) for count in lengths] for _ in range(world.size)]
    dist.all_gather_coalesced(outputs, own)
    for rank, of_rank in enumerate(outputs):
        for salt, count in enumerate(lengths):
            assert_equal(of_rank[salt], tensor(count, torch.float32, rank, salt), (rank, salt))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.bool, torch.complex64], ids=str)
def test_what_only_moves(world: World, backend: str, dtype: torch.dtype) -> None:
    """Broadcast, allgather, gather, scatter: every root, every length."""
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


def test_reduce(world: World) -> None:
    for root in range(world.size):
        for name, (op, function) in REDUCTIONS.items():
            make = factors if name == "product" else pattern
            for count in (0, 1, 2 * world.size + 1):
                mine = torch.from_numpy(make(count, world.rank)).float()
                dist.reduce(mine, root, op)
                if world.rank == root:
                    assert_equal(mine, expected([make(count, rank) for rank in range(world.size)], function), name)
    mine = tensor(LONG, torch.float32, world.rank)
    dist.reduce(mine, world.size - 1)
    if world.rank == world.size - 1:
        assert_equal(mine, expected([pattern(LONG, rank) for rank in range(world.size)], numpy.add))


def test_allgather_of_long_and_uneven_tensors(world: World, ours: None) -> None:
    parts = [torch.empty(LONG) for _ in range(world.size)]
    dist.all_gather(parts, tensor(LONG, torch.float32, world.rank))
    for rank, part in enumerate(parts):
        assert_equal(part, torch.from_numpy(pattern(LONG, rank)))
    # As with NCCL, ranks may give different lengths: rank r gives r.
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
    if backend != "gloo":  # which takes the other form only
        stacked = torch.empty(size, 2, 3)
        all_gather_single(stacked, tensor(6, torch.float32, world.rank).view(2, 3))
        for rank in range(size):
            assert_equal(stacked[rank], torch.from_numpy(pattern(6, rank)).view(2, 3))
    # The input may lie where it goes, as FSDP has it.
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
    # The result may lie in the input, as FSDP has it.
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
    # Single, even.
    mine = torch.cat([tensor(3, torch.int64, rank, salt=other) for other in range(size)])
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    for other in range(size):
        assert_equal(received[3 * other : 3 * other + 3], tensor(3, torch.int64, other, salt=rank))
    # Rank r sends r + s items of two numbers to rank s: from rank 0 to itself none.
    lengths = [rank + other for other in range(size)]
    mine = torch.cat([tensor(2 * (rank + other), torch.float32, rank, salt=other).view(-1, 2) for other in range(size)])
    received = torch.empty(sum(lengths), 2)
    dist.all_to_all_single(received, mine, lengths, lengths)
    for other, part in enumerate(received.split(lengths)):
        assert_equal(part, tensor(2 * lengths[other], torch.float32, other, salt=rank).view(-1, 2))
    if backend == "gloo":
        return
    # In place: what is still to be sent must not be overwritten.
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
        dist.all_reduce(tensor(LONG, torch.float32, world.rank), async_op=True)  # nor keeps the memory
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
        return  # its work never says so
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def test_grad_mode_and_autograd_do_not_matter(world: World) -> None:
    leaf = torch.ones(4, requires_grad=True)
    loss = (leaf * (world.rank + 1)).sum()
    loss.backward()
    dist.all_reduce(leaf.grad)
    assert (leaf.grad == sum(range(1, world.size + 1))).all()
    with torch.no_grad():
        dist.broadcast(leaf, 0)
    with torch.inference_mode():
        inside = torch.full((3,), float(world.rank))
        dist.all_reduce(inside)
    assert (inside == sum(range(world.size))).all()
