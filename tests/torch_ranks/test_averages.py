"""ReduceOp.AVG, which gloo does not have: of floats, and of integers as NCCL has it."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mpitrain import World
from tests.torch_ranks.common import FLOATS, assert_equal, pattern, reduce_scatter_single, tensor

pytestmark = pytest.mark.usefixtures("group", "ours")

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


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


@pytest.mark.parametrize("name", INTEGERS)
def test_averages_of_integers(world: World, name: str) -> None:
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


def test_an_average_of_a_negative_sum_goes_toward_zero(world: World) -> None:
    """As C++ divides: -1 of some ranks is 0. Lightning's `self.log(..., sync_dist=True)` does it with a counter."""
    values = torch.tensor([0, 0, 0] if world.rank else [-1, 1, -world.size - 1])
    dist.all_reduce(values, ReduceOp.AVG)
    assert values.tolist() == ([-1, 1, -2] if world.size == 1 else [0, 0, -1])
