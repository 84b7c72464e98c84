"""torch.compile around what communicates: the values are those of the same program without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.nn.parallel import DistributedDataParallel

import mpitrain
from mpitrain import World
from mpitrain.torch.backend import MpiProcessGroup

from .prepared import compare, mlp

pytestmark = [
    pytest.mark.usefixtures("group"),
    # Said of torch's own calls, in front of which it then ends a part of the function.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Any) -> Any:
    """By the whole front of torch.compile; the other half makes machine code, and needs a compiler for C++."""
    return torch.compile(function, backend="eager")


def test_data_parallel(world: World) -> None:
    """DDP makes its buckets anew in the second step, which sends from the middle of a compiled function."""
    inner = nn.Linear(5, 3).double()
    with torch.no_grad():
        inner.weight.copy_(torch.arange(15).view(3, 5) + world.rank)  # DDP begins with rank 0's
    model = compiled(DistributedDataParallel(inner))
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 5), float(step + world.rank), dtype=torch.float64)).sum().backward()
        wanted = torch.full((3, 5), step + (world.size - 1) / 2, dtype=torch.float64)
        torch.testing.assert_close(inner.weight.grad, wanted, rtol=1e-12, atol=0)
    assert torch.equal(inner.weight, torch.arange(15, dtype=torch.float64).view(3, 5))
    for name in ("allreduce", "broadcast"):  # which torch's C++ has called meanwhile
        assert not _debug_get_cache_entry_list(getattr(MpiProcessGroup, name).__code__)


def summed_later(x: torch.Tensor) -> torch.Tensor:
    twice = x * 2
    work = dist.all_reduce(twice, async_op=True)
    dist.barrier()
    work.wait()
    return twice + 1


def summed_by_a_future(x: torch.Tensor) -> torch.Tensor:
    return dist.all_reduce(x * 2, async_op=True).get_future().wait()[0] + 1


def summed_by_mpitrain(x: torch.Tensor) -> torch.Tensor:
    world = mpitrain.init()
    total = torch.from_numpy(world.sum((x * 2).numpy()))
    world.barrier()
    return total + 1


FUNCTIONS = [summed_later, summed_by_a_future, summed_by_mpitrain]


@pytest.mark.nightly
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_calls_in_a_compiled_function(world: World, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(3.0) + world.rank
    total = torch.arange(3.0) * world.size + sum(range(world.size))
    for _ in range(2):
        assert torch.equal(compiled(function)(x), total * 2 + 1)


@pytest.mark.nightly
def test_a_prepared_step(world: World) -> None:
    """Also where the backward pass, and so all communication, is inside of the compiled function."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        step = compiled(step)
        for x, y in data:
            step(x, y)

    made = torch.Generator().manual_seed(1)
    each = torch.randn(2, 2 * world.size, 5, dtype=torch.float64, generator=made)
    batches = [(x, torch.arange(2 * world.size) % 3) for x in each]
    compare(world, mlp(), lambda: batches, run=run)
