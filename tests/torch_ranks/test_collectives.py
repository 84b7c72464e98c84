"""What torch.distributed sums: values, dtypes, lengths, layouts of memory, sparse tensors; works and futures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mpitrain import World
from mpitrain.errors import MismatchError, ProcessGroupError
from tests.ranks.common import named_ranks, skip_alone

from .common import (
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
ROWS = 11


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_allreduce_and_reduce(world: World, dtype: torch.dtype) -> None:
    operations = REDUCTIONS | (BITWISE if not dtype.is_floating_point else {})
    for count in counts(world):
        root = count % world.size
        for name, (op, function) in operations.items():
            make = factors if name == "product" else pattern
            wanted = expected([make(count, rank) for rank in range(world.size)], function)
            mine = torch.from_numpy(make(count, world.rank)).to(dtype)
            at_root = mine.clone()
            assert dist.all_reduce(mine, op) is None
            assert_equal(mine, wanted, (name, count))
            dist.reduce(at_root, root, op)
            if world.rank == root:
                assert_equal(at_root, wanted, (name, count))


def test_sums_of_other_kinds(world: World) -> None:
    """Long tensors, scalars, complex numbers, truths, what is not finite, and a part of a tensor."""
    everybody = range(world.size)
    total = expected([pattern(LONG, rank) for rank in everybody], numpy.add)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        mine = tensor(LONG, dtype, world.rank)
        dist.all_reduce(mine)
        assert_equal(mine, total, dtype)
    mine = tensor(LONG, torch.float32, world.rank)
    dist.reduce(mine, world.size - 1)
    if world.rank == world.size - 1:
        assert_equal(mine, total)
    scalar = torch.tensor(world.rank + 1.5)
    dist.all_reduce(scalar)
    assert scalar.item() == sum(rank + 1.5 for rank in everybody)
    complex_sum = torch.complex(tensor(5, torch.float32, world.rank), tensor(5, torch.float32, world.rank, salt=1))
    dist.all_reduce(complex_sum)
    parts = [expected([pattern(5, rank, salt) for rank in everybody], numpy.add).float() for salt in (0, 1)]
    assert_equal(complex_sum, torch.complex(*parts))
    for op, first in ((ReduceOp.MAX, True), (ReduceOp.MIN, world.size == 1)):
        flags = torch.tensor([world.rank == 0, True, False])
        dist.all_reduce(flags, op)
        assert flags.tolist() == [first, True, False]
    mine = torch.tensor([float("inf"), 1.0, 1.0 if world.rank else float("nan")])
    dist.all_reduce(mine)
    assert mine[:2].tolist() == [float("inf"), world.size]
    assert mine[2].isnan()
    whole, own = tensor(50, torch.float32, world.rank), torch.from_numpy(pattern(50, world.rank))
    dist.all_reduce(whole[10:20])
    assert_equal(whole[10:20], total[:50][10:20])
    assert_equal(whole[:10], own[:10])
    assert_equal(whole[20:], own[20:])


@pytest.mark.parametrize("strided", [False, True])
def test_layouts_of_memory(world: World, strided: bool) -> None:
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


def test_grad_mode_does_not_matter(world: World) -> None:
    parameter = torch.nn.Parameter(torch.full((2, 3), float(world.rank)))
    with torch.no_grad():
        dist.all_reduce(parameter)
    with torch.inference_mode():
        inside = torch.full((3,), float(world.rank))
        dist.all_reduce(inside)
    assert (parameter == sum(range(world.size))).all()
    assert (inside == sum(range(world.size))).all()


# -- averages --


def test_average(world: World) -> None:
    for dtype in FLOATS:
        for count in (0, 1, 7 * world.size + 3):
            mine = tensor(count, dtype, world.rank)
            dist.all_reduce(mine, ReduceOp.AVG)
            wanted = numpy.mean([pattern(count, rank) for rank in range(world.size)], axis=0)
            bound = (world.size + 2) * torch.finfo(dtype).eps / 2 * numpy.abs(wanted)
            assert (numpy.abs(mine.double().numpy() - wanted) <= bound).all(), (dtype, count)


def of_rank(rank: int, dtype: str) -> numpy.ndarray:
    """Sums of both signs with every remainder; the last ones leave the dtype with two ranks and more."""
    values = pattern(40, rank).astype(dtype)
    if dtype.startswith("i"):
        values[:20] -= numpy.array(9 + rank, dtype)
        values[-2] = numpy.iinfo(dtype).min
    values[-1] = numpy.iinfo(dtype).max - rank
    return values


def mean_of(arrays: list[numpy.ndarray]) -> numpy.ndarray:
    """In Python's integers: the sum as the dtype holds it, divided toward zero."""
    dtype = arrays[0].dtype
    bits = 8 * dtype.itemsize
    means = []
    for values in zip(*(array.tolist() for array in arrays), strict=True):
        total = sum(values) % 2**bits
        if dtype.kind == "i" and total >= 2 ** (bits - 1):
            total -= 2**bits
        means.append(abs(total) // len(arrays) * (-1 if total < 0 else 1))
    return numpy.array(means, dtype)


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_averages_of_integers(world: World, name: str) -> None:
    """As NCCL has them, toward zero; Lightning's `self.log(..., sync_dist=True)` makes them of a counter."""
    of_all = [of_rank(rank, name) for rank in range(world.size)]
    wanted = torch.from_numpy(mean_of(of_all))
    mine = torch.from_numpy(of_all[world.rank].copy())
    dist.all_reduce(mine, ReduceOp.AVG)
    assert_equal(mine, wanted)
    mine = torch.from_numpy(of_all[world.rank].copy())
    dist.reduce(mine, world.size - 1, ReduceOp.AVG)
    if world.rank == world.size - 1:
        assert_equal(mine, wanted)
    part = torch.empty(40, dtype=mine.dtype)
    reduce_scatter_single(part, torch.from_numpy(numpy.tile(of_all[world.rank], world.size)), ReduceOp.AVG)
    assert_equal(part, wanted)


# -- sparse tensors --


def sparse_of(rank: int, dtype: torch.dtype, dense: tuple[int, ...] = (), each: int = 3) -> torch.Tensor:
    """With `each` elements a rank number: rank 0 has none. From rank 2 on places come several times."""
    count = each * rank
    places = torch.from_numpy(pattern(2 * count, rank)).view(2, count) % torch.tensor([[ROWS], [5]])
    places[:, 1:2] = places[:, :1]
    values = torch.from_numpy(pattern(count * max(1, sum(dense)), rank, salt=1)).view(count, *dense).to(dtype)
    return torch.sparse_coo_tensor(places, values, (ROWS, 5, *dense), check_invariants=True)


@pytest.mark.parametrize("dense", [(), (4,)], ids=["all dimensions sparse", "rows of 4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64], ids=str)
def test_sparse_sum(world: World, dtype: torch.dtype, dense: tuple[int, ...]) -> None:
    for each in (3, 5000 if dtype == torch.float32 else 0):  # short, long, and nothing anywhere
        mine = sparse_of(world.rank, dtype, dense, each)
        wanted = torch.zeros(mine.shape, dtype=torch.complex128)
        for rank in range(world.size):
            wanted += sparse_of(rank, dtype, dense, each).to_dense().to(wanted.dtype)
        work, other = dist.all_reduce(mine, async_op=True), torch.ones(3)
        dist.all_reduce(other)
        assert work.wait()
        assert (mine.layout, mine.dtype) == (torch.sparse_coo, dtype)
        assert torch.equal(mine.to_dense().to(wanted.dtype), wanted), each
        assert (other == world.size).all()


def test_sparse_tensors_of_different_shapes(world: World) -> None:
    skip_alone(world)
    group = dist.new_group()  # its first calls are compared
    odd = world.size - 1
    mine = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1), (8 - (world.rank == odd),), check_invariants=True
    )
    with pytest.raises(MismatchError, match=r"\(7,\), of which 1 sparse") as caught:
        dist.all_reduce(mine, group=group)
    for name in named_ranks(world, odd):
        assert name in str(caught.value)
    dist.destroy_process_group(group)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_sparse_tensors_cannot(world: World) -> None:
    sparse = torch.ones(3).to_sparse()
    with pytest.raises(ProcessGroupError, match=r"ReduceOp.MAX of a sparse tensor; it can be SUM") as caught:
        dist.all_reduce(sparse, ReduceOp.MAX)
    assert world.name() in str(caught.value)
    dist.barrier()  # and the group works on
    with pytest.raises(TypeError, match="to_dense"):
        dist.all_reduce(torch.ones(3, 3).to_sparse_csr())
    dist.barrier()
    with pytest.raises(TypeError, match="to_dense"):
        dist.reduce(sparse, 0)
    dist.barrier()


# -- works and futures --


def test_barrier(world: World, shared: Any) -> None:
    for turn in range(3):
        (shared / f"{turn} {world.rank}").touch()
        dist.barrier()
        assert len(list(shared.glob(f"{turn} *"))) == world.size
    work = dist.barrier(async_op=True)
    work.wait()


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


def ones(count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def used(call: Callable[..., Any], *arguments: Any) -> tuple[Any, list[torch.Tensor]]:
    """Begin the call; its work, and the tensors among its arguments."""
    lists = [argument if isinstance(argument, list) else [argument] for argument in arguments]
    tensors = [one for part in lists for one in part if isinstance(one, torch.Tensor)]
    return call(*arguments, async_op=True), tensors


# Gets the rank, the number of ranks, and a tensor for each rank if this is the root.
CALLS: dict[str, Callable[[int, Any], Any]] = {
    "all_reduce": lambda n, _: used(dist.all_reduce, ones()),
    "all_reduce of another dtype": lambda n, _: used(dist.all_reduce, ones(dtype=torch.bfloat16)),
    "all_reduce by another operation": lambda n, _: used(dist.all_reduce, ones(), ReduceOp.MAX),
    "broadcast": lambda n, _: used(dist.broadcast, ones(), 0),
    "reduce": lambda n, _: used(dist.reduce, ones(), 0),
    "all_gather": lambda n, _: used(dist.all_gather, [ones() for _ in range(n)], ones()),
    "all_gather_single": lambda n, _: used(all_gather_single, ones(3 * n), ones()),
    "gather": lambda n, at_root: used(dist.gather, ones(), at_root, 0),
    "scatter": lambda n, at_root: used(dist.scatter, ones(), at_root, 0),
    "reduce_scatter_single": lambda n, _: used(reduce_scatter_single, ones(), ones(3 * n)),
    "all_to_all_single": lambda n, _: used(dist.all_to_all_single, ones(n), ones(n)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_gives_a_work_and_the_memory_back(world: World, name: str) -> None:
    """Memory that was used can be given back and taken again, as FSDP does it."""
    work, tensors = CALLS[name](world.size, [ones() for _ in range(world.size)] if world.is_root else None)
    assert work.wait()
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    for one in tensors:
        storage = one.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(num_bytes)
        assert storage.nbytes() == num_bytes > 0
