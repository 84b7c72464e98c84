"""DistributedDataParallel and what goes with it, against one process that has the whole batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from mpitrain import World
from tests.ranks.common import skip_alone

from .common import CLOSE, Model, samples, train

pytestmark = pytest.mark.usefixtures("group")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}], ids=str)
def test_as_one_process(world: World, options: dict[str, Any]) -> None:
    inner, alone = Model(), Model()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(world.rank)  # DDP begins with the parameters of rank 0
    train(world, DistributedDataParallel(inner, **options), sgd(inner), range(3), whole=False)
    train(world, alone, sgd(alone), range(3), whole=True)
    for (name, one), other in zip(inner.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_buffers_are_those_of_rank_0(world: World) -> None:
    inner = nn.Sequential(nn.Linear(6, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64))
    model = DistributedDataParallel(inner)
    x, _ = samples(world, world.rank)
    for _ in range(2):
        model(x).sum().backward()  # brings the buffers of rank 0, then each rank changes its own
    means = world.allgather(inner[1].running_mean.tolist())
    again = copy.deepcopy(inner)
    model(x).sum().backward()
    assert world.size == 1 or means[0] != means[1]
    wanted = 0.9 * torch.tensor(means[0], dtype=torch.float64) + 0.1 * again[0](x).mean(0)
    torch.testing.assert_close(inner[1].running_mean, wanted, **CLOSE)


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_uneven_inputs(world: World, divide_by_initial_world_size: bool) -> None:
    """In `join`, a rank without samples follows the calls of the others. Only PyTorch's C++ then holds its sums."""
    steps = [3 + 4 * rank for rank in range(world.size)]  # of each rank
    inputs = [[60.0 * (step * world.size + rank) for step in range(steps[rank])] for rank in range(world.size)]
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for value in inputs[world.rank]:
            optimizer.zero_grad()
            model(torch.full((1, 1), value, dtype=torch.float64)).sum().backward()
            optimizer.step()
    weight = 1.0
    for step in range(max(steps)):
        there = [inputs[rank][step] for rank in range(world.size) if step < steps[rank]]
        weight -= sum(there) / (world.size if divide_by_initial_world_size else len(there))
    assert model.module.weight.item() == weight


# -- beside gloo -------------------------------------------------------------------------------------------------------


def trained(group: Any, model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    optimizer = sgd(model)
    for step in range(steps):
        x, y = of_rank(group, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def of_rank(group: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Other numbers of samples on each rank and in each step."""
    made = torch.Generator().manual_seed(100 * step + dist.get_rank(group))
    count = 3 + (step + dist.get_rank(group)) % 3
    return tuple(torch.randn(count, width, dtype=torch.float64, generator=made) for width in (6, 3))


def uneven_inputs_of_two(group: Any) -> list[torch.Tensor]:
    """Join with an optimizer in parts beside the model; rank r has r + 1 batches."""
    model = DistributedDataParallel(Model(), process_group=group)
    trained = [one for one in model.parameters() if one.requires_grad]
    parts = ZeroRedundancyOptimizer(trained, torch.optim.SGD, process_group=group, lr=0.1, momentum=0.9)
    with Join([model, parts]):
        for step in range(dist.get_rank(group) + 1):
            x, y = of_rank(group, step)
            parts.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            parts.step()
    return [one.detach().clone() for one in model.parameters()]


def sharded_tensor(group: Any) -> list[torch.Tensor]:
    """Rank r has r + 1 rows; rank 0 gathers all of them."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.full((rank + 1, 2), rank + 1.0)
    where = ShardMetadata([rank * (rank + 1) // 2, 0], [rank + 1, 2], f"rank:{rank}/cpu")
    whole_shape = (size * (size + 1) // 2, 2)
    made = init_from_local_shards([Shard(rows, where)], whole_shape, process_group=group)
    whole = torch.zeros(whole_shape)
    made.gather(0, whole if rank == 0 else None)
    return [rows, whole]


def half_precision(group: Any) -> list[torch.Tensor]:
    """By the hook of PyTorch's C++."""
    model = DistributedDataParallel(Model(), process_group=group)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return trained(group, model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # some of these are said to go one day
@pytest.mark.parametrize(
    "program", [uneven_inputs_of_two, sharded_tensor, half_precision], ids=lambda one: one.__name__
)
def test_values_are_those_of_gloo(world: World, program: Callable[[Any], list[torch.Tensor]]) -> None:
    """On 2 ranks with the same bits: a + b has no order. On more ranks they may differ by rounding."""
    skip_alone(world)
    gloo = dist.new_group(backend="gloo")
    wanted, found = program(gloo), program(dist.group.WORLD)
    dist.destroy_process_group(gloo)
    # Half the bits of a double, where fp16 rounds.
    bound = 0.0 if world.size <= 2 else 1e-3 if program is half_precision else 1e-10
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    assert any(one.abs().sum() > 0 for one in found)
