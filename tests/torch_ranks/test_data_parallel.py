"""DistributedDataParallel and what goes with it, against one process that has the whole batch, in float64."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from mpitrain import World

from .data_parallel import CLOSE, EACH, Model, part, samples

pytestmark = pytest.mark.usefixtures("group")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def steps_of_one_process(world: World, steps: int, start: nn.Module | None = None) -> nn.Module:
    """The model after so many steps on whole batches, without communication."""
    model = start or Model()
    optimizer = optimizer_of(model)
    for step in range(steps):
        x, y = samples(world, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def assert_same_parameters(found: nn.Module, wanted: nn.Module, **close: float) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, **(close or CLOSE), msg=lambda text, name=name: f"{name}: {text}")


def train(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x, y = samples(world, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(part(world, x)), part(world, y)).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}], ids=str)
def test_as_one_process(world: World, options: dict[str, Any]) -> None:
    inner = Model()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(world.rank)  # DDP begins with the parameters of rank 0
    model = DistributedDataParallel(inner, **options)
    train(world, model, optimizer_of(inner), 3)
    assert_same_parameters(inner, steps_of_one_process(world, 3))


def test_accumulation_without_exchange(world: World) -> None:
    inner = Model()
    model = DistributedDataParallel(inner)
    for step in range(3):
        x, y = samples(world, step)
        with model.no_sync() if step < 2 else nullcontext():
            nn.functional.mse_loss(model(part(world, x)), part(world, y)).backward()
    alone = Model()
    for step in range(3):
        x, y = samples(world, step)
        nn.functional.mse_loss(alone(x), y).backward()
    torch.testing.assert_close(inner.first.weight.grad, alone.first.weight.grad, **CLOSE)


def test_unused_parameters(world: World) -> None:
    """Only rank 0 uses a layer, and the gradients of the others count as zeros. In the second step no rank uses it."""
    inner = Model()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    x, y = samples(world, 0)
    nn.functional.mse_loss(model(part(world, x), whole=world.rank == 0), part(world, y)).backward()
    alone = Model()
    for rank in range(world.size):
        rows = slice(rank * EACH, (rank + 1) * EACH)
        (nn.functional.mse_loss(alone(x[rows], whole=rank == 0), y[rows]) / world.size).backward()
    for name in ("first", "sometimes", "last"):
        torch.testing.assert_close(getattr(inner, name).weight.grad, getattr(alone, name).weight.grad, **CLOSE)
    model.zero_grad()
    nn.functional.mse_loss(model(part(world, x), whole=False), part(world, y)).backward()
    assert inner.sometimes.weight.grad is None


def test_join_with_uneven_inputs(world: World) -> None:
    """Rank r has r + 1 batches. DDP divides by the size of the world, so a rank that has ended adds zeros."""
    inner = Model()
    model = DistributedDataParallel(inner)
    optimizer = optimizer_of(inner)
    with model.join():
        for step in range(world.rank + 1):
            x, y = samples(world, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(part(world, x)), part(world, y)).backward()
            optimizer.step()
    alone = Model()
    optimizer = optimizer_of(alone)
    for step in range(world.size):
        x, y = samples(world, step)
        optimizer.zero_grad()
        for rank in range(step, world.size):
            rows = slice(rank * EACH, (rank + 1) * EACH)
            (nn.functional.mse_loss(alone(x[rows]), y[rows]) / world.size).backward()
        optimizer.step()
    assert_same_parameters(inner, alone)  # the other ranks got those of the last rank at the end
    dist.barrier()


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


def test_sync_batch_norm_is_for_gpus(world: World) -> None:
    """PyTorch itself refuses the layer on the CPU, with every backend: in DDP, and alone."""
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(6))
    with pytest.raises(ValueError, match="only work with GPU"):
        DistributedDataParallel(layer)
    with pytest.raises(ValueError, match="expected input tensor to be on"):
        layer(torch.ones(4, 6))


@pytest.mark.parametrize("overlap", [False, True])
def test_zero_redundancy_optimizer(world: World, overlap: bool) -> None:
    inner = Model()
    model = DistributedDataParallel(inner, gradient_as_bucket_view=overlap)
    parameters = [p for p in inner.parameters() if p.requires_grad]
    optimizer = ZeroRedundancyOptimizer(
        parameters, torch.optim.Adam, parameters_as_bucket_view=overlap, lr=0.01, betas=(0.8, 0.9)
    )
    train(world, model, optimizer, 3)
    alone = Model()
    plain = torch.optim.Adam([p for p in alone.parameters() if p.requires_grad], lr=0.01, betas=(0.8, 0.9))
    for step in range(3):
        x, y = samples(world, step)
        plain.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        plain.step()
    # Adam divides by roots of small numbers, so roundings grow.
    assert_same_parameters(inner, alone, rtol=1e-9, atol=1e-11)
    optimizer.consolidate_state_dict(to=world.size - 1)
    if world.rank == world.size - 1:
        found = optimizer.state_dict()["state"]
        for number, state in plain.state_dict()["state"].items():
            torch.testing.assert_close(found[number]["exp_avg"], state["exp_avg"], rtol=1e-9, atol=1e-11)
    dist.barrier()


def test_in_a_group_of_some_ranks(world: World) -> None:
    ranks = list(range(0, world.size, 2))
    some = dist.new_group(ranks)
    if world.rank in ranks:
        inner = Model()
        model = DistributedDataParallel(inner, process_group=some)
        x, y = samples(world, 0)
        nn.functional.mse_loss(model(part(world, x)), part(world, y)).backward()
        alone = Model()
        for rank in ranks:
            rows = slice(rank * EACH, (rank + 1) * EACH)
            (nn.functional.mse_loss(alone(x[rows]), y[rows]) / len(ranks)).backward()
        torch.testing.assert_close(inner.first.weight.grad, alone.first.weight.grad, **CLOSE)
        del model
        dist.destroy_process_group(some)
    dist.barrier()


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
def test_functional_collectives_and_autograd(world: World) -> None:
    """The collectives of torch.distributed.nn have derivatives."""
    import torch.distributed.nn.functional as functional

    x = torch.full((2,), float(world.rank + 1), dtype=torch.float64, requires_grad=True)
    total = functional.all_reduce(x)
    ((world.rank + 1) * total).sum().backward()
    everybody = sum(range(1, world.size + 1))
    assert total.tolist() == [everybody] * 2
    assert x.grad.tolist() == [everybody] * 2


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
