"""Allreduce and reduce of torch.distributed: values, dtypes, lengths and layouts of memory."""

from __future__ import annotations

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
    LONG,
    REDUCTIONS,
    all_gather_single,
    assert_equal,
    counts,
    expected,
    factors,
    pattern,
    reduce_scatter_single,
    tensor,
)

pytestmark = pytest.mark.usefixtures("group")


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
    """The tensors are not contiguous. What lies between their elements stays as it is."""
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
    # A tensor whose elements share memory is read as it looks.
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
    """One call takes several tensors, and each has the result that it would have alone."""
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
