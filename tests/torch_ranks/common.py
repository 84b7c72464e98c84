"""Values and checks that the tests of torch.distributed share. Expected values come from NumPy and Python alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from mpitrain import World

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LONG = 100_003  # more than one piece of 256 KiB in float32, and a prime number

# Newer versions of PyTorch have renamed these two functions, and warn of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def counts(world: World) -> list[int]:
    """The lengths 0, 1, one fewer than there are ranks, and 3 more than 7 for each rank."""
    return [0, 1, world.size - 1, 7 * world.size + 3]


def pattern(count: int, rank: int, salt: int = 0) -> numpy.ndarray:
    """Small integers that differ from rank to rank, place to place and call to call; exact in every dtype."""
    return (numpy.arange(count) * 7 + rank * 5 + salt * 3) % 17


def tensor(count: int, dtype: torch.dtype, rank: int, salt: int = 0) -> torch.Tensor:
    """`pattern` as a tensor."""
    return torch.from_numpy(pattern(count, rank, salt)).to(dtype)


REDUCTIONS: dict[str, tuple[Any, Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]]] = {
    "sum": (ReduceOp.SUM, numpy.add),
    "product": (ReduceOp.PRODUCT, numpy.multiply),
    "min": (ReduceOp.MIN, numpy.minimum),
    "max": (ReduceOp.MAX, numpy.maximum),
}
BITWISE: dict[str, tuple[Any, Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]]] = {
    "band": (ReduceOp.BAND, numpy.bitwise_and),
    "bor": (ReduceOp.BOR, numpy.bitwise_or),
    "bxor": (ReduceOp.BXOR, numpy.bitwise_xor),
}


def factors(count: int, rank: int) -> numpy.ndarray:
    """The numbers 1 and 2. Products of up to 5 of them are exact in every dtype."""
    return 1 + (numpy.arange(count) + rank) % 2


def expected(arrays: Sequence[numpy.ndarray], operation: Callable[..., numpy.ndarray]) -> torch.Tensor:
    """The ranks' arrays reduced one after the other, in int64."""
    return torch.from_numpy(reduce(operation, arrays))


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, about: object = "") -> None:
    """Assert that shapes and values are the same. `wanted` may have a wider dtype."""
    assert found.shape == wanted.shape, about
    assert torch.equal(found, wanted.to(found.dtype)), (about, found, wanted)


def nightly(*values: Any) -> list[Any]:
    """Values of a parameter that only scripts/test --nightly tries."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


# -- of DistributedDataParallel and FSDP: a model in float64, the samples of each rank, and a loop -----

EACH = 3  # samples of each rank
# Both sides add the same float64 numbers in different orders. The bound is far above the rounding, and far below
# any error.
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


class Model(nn.Module):
    """Two layers, one of which `forward` may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 40, dtype=torch.float64)
        self.sometimes = nn.Linear(40, 40, dtype=torch.float64)
        self.never = nn.Linear(2, 2, dtype=torch.float64)
        self.last = nn.Linear(40, 3, dtype=torch.float64)
        self.never.requires_grad_(False)

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.sometimes(x) if whole else x)


def samples(world: World, step: int, each: int = EACH) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step. The samples of rank r begin at r * each."""
    made = torch.Generator().manual_seed(step)
    count = each * world.size
    return (
        torch.randn(count, 6, dtype=torch.float64, generator=made),
        torch.randn(count, 3, dtype=torch.float64, generator=made),
    )


def part(world: World, batch: torch.Tensor) -> torch.Tensor:
    each = len(batch) // world.size
    return batch[world.rank * each : (world.rank + 1) * each]


def train(world: World, net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, whole: bool) -> None:
    """On whole batches without communication, or on this rank's part of each."""
    for step in steps:
        x, y = (batch if whole else part(world, batch) for batch in samples(world, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
