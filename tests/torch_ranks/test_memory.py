"""The memory of tensors after a call is what it was before it: it can be given back and taken again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from mpitrain import World
from tests.torch_ranks.common import all_gather_single, reduce_scatter_single
from tests.torch_ranks.test_sharded import CLOSE, adam, model, samples, train

pytestmark = pytest.mark.usefixtures("group")

Tensors = list[torch.Tensor]


def used(call: Callable[..., Any], *arguments: Any) -> Tensors:
    """Make the call; the tensors among its arguments."""
    call(*arguments)
    lists = [argument if isinstance(argument, list) else [argument] for argument in arguments]
    return [one for part in lists for one in part if isinstance(one, torch.Tensor)]


def around(rank: int, size: int) -> Tensors:
    sent, received = torch.ones(3), torch.zeros(3)
    works = [dist.isend(sent, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)] if size > 1 else []
    for work in works:
        work.wait()
    return [sent, received]


# Each returns the tensors that it has used.
CALLS: dict[str, Callable[[int, int], Tensors]] = {
    "all_reduce": lambda rank, size: used(dist.all_reduce, torch.ones(3)),
    "all_reduce of another dtype": lambda rank, size: used(dist.all_reduce, torch.ones(3, dtype=torch.bfloat16)),
    "all_reduce by another operation": lambda rank, size: used(dist.all_reduce, torch.ones(3), ReduceOp.MAX),
    "broadcast": lambda rank, size: used(dist.broadcast, torch.ones(3), 0),
    "reduce": lambda rank, size: used(dist.reduce, torch.ones(3), 0),
    "all_gather": lambda rank, size: used(dist.all_gather, [torch.ones(3) for _ in range(size)], torch.ones(3)),
    "all_gather_single": lambda rank, size: used(all_gather_single, torch.ones(3 * size), torch.ones(3)),
    "gather": lambda rank, size: used(
        dist.gather, torch.ones(3), [torch.ones(3) for _ in range(size)] if rank == 0 else None, 0
    ),
    "scatter": lambda rank, size: used(
        dist.scatter, torch.ones(3), [torch.ones(3) for _ in range(size)] if rank == 0 else None, 0
    ),
    "reduce_scatter_single": lambda rank, size: used(reduce_scatter_single, torch.ones(3), torch.ones(3 * size)),
    "all_to_all_single": lambda rank, size: used(dist.all_to_all_single, torch.ones(size), torch.ones(size)),
    "send and recv": around,
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_can_be_given_back(world: World, name: str) -> None:
    for tensor in CALLS[name](world.rank, world.size):
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(num_bytes)
        assert storage.nbytes() == num_bytes > 0


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=lambda s: s.name
)
def test_fsdp1(world: World, strategy: ShardingStrategy) -> None:
    """It gives back a layer's parameters after each use of them. Against one process with the whole batch."""
    inner = model()
    for place in (0, 2):
        inner[place] = FullyShardedDataParallel(
            inner[place], device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True
        )
    net = FullyShardedDataParallel(
        inner, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True
    )
    train(world, net, adam(net), first=0, steps=3, whole=False)
    alone = model()
    train(world, alone, adam(alone), first=0, steps=3, whole=True)
    with FullyShardedDataParallel.summon_full_params(net):
        found = [parameter.detach().clone() for parameter in net.parameters()]
    for one, other in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), **CLOSE)
    x, y = samples(world, 9)
    rows = slice(world.rank * 3, world.rank * 3 + 3)
    losses = [nn.functional.mse_loss(one(x[rows]), y[rows]).item() for one in (net, alone)]
    assert abs(losses[0] - losses[1]) <= 1e-12 * losses[1]
