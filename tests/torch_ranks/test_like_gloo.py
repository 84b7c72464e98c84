"""Programs of the kinds that people bring, over gloo and over mpitrain in one job: the values are equal.

A program is a function of a process group. It trains or exchanges something that differs from rank to rank, and returns
what it got on this rank. On 2 ranks both must have the same bits: a + b has no order. On more ranks they may differ by
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mpitrain import World
from tests.ranks.common import skip_alone

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # FSDP1 and others are said to go one day
    pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning"),
]

Program = Callable[[Any], list[torch.Tensor]]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def batch(group: Any, step: int, count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank(group))
    x = torch.randn(count, 7, dtype=torch.float64, generator=made)
    return x, torch.randn(count, 3, dtype=torch.float64, generator=made)


def trained(group: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 4) -> nn.Module:
    """`steps` steps of SGD with momentum, each with other numbers of samples."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(group, step, count=3 + (step + dist.get_rank(group)) % 3)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def values(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def wrapped(group: Any, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), process_group=group, **settings)


@program
def data_parallel(group: Any) -> list[torch.Tensor]:
    return values(trained(group, wrapped(group)))


@program
def many_small_buckets(group: Any) -> list[torch.Tensor]:
    return values(trained(group, wrapped(group, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)))


@program
def static_graph(group: Any) -> list[torch.Tensor]:
    return values(trained(group, wrapped(group, static_graph=True)))


@program
def unused_parameters(group: Any) -> list[torch.Tensor]:
    """Which half of the model a step uses differs from rank to rank."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.calls = network(), network(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (self.first if (self.calls + dist.get_rank(group)) % 2 else self.second)(x)

    return values(trained(group, DistributedDataParallel(Either(), process_group=group, find_unused_parameters=True)))


@program
def accumulated_gradients(group: Any) -> list[torch.Tensor]:
    model = wrapped(group)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            x, y = batch(group, 2 * step)
            nn.functional.mse_loss(model(x), y).backward()
        x, y = batch(group, 2 * step + 1)
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return values(model)


@program
def uneven_inputs(group: Any) -> list[torch.Tensor]:
    """model.join(): rank r has r + 1 batches."""
    model = wrapped(group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(dist.get_rank(group) + 1):
            x, y = batch(group, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return values(model)


@program
def uneven_inputs_of_two(group: Any) -> list[torch.Tensor]:
    """Join with an optimizer in parts beside the model."""
    model = wrapped(group)
    parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1, momentum=0.9)
    with Join([model, parts]):
        for step in range(dist.get_rank(group) + 1):
            x, y = batch(group, step)
            parts.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            parts.step()
    return values(model)


@program
def optimizer_in_parts(group: Any) -> list[torch.Tensor]:
    model = wrapped(group)
    parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
    return values(trained(group, model, parts))


@program
def compiled(group: Any) -> list[torch.Tensor]:
    torch.compiler.reset()
    model = trained(group, torch.compile(wrapped(group), backend="eager", dynamic=True))
    torch.compiler.reset()
    return values(model)


@program
def a_sum_inside_a_compiled_function(group: Any) -> list[torch.Tensor]:
    @torch.compile(backend="eager")
    def summed(x: torch.Tensor) -> torch.Tensor:
        twice = x * 2
        dist.all_reduce(twice, group=group)
        return twice + 1

    torch.compiler.reset()
    found = [summed(batch(group, step)[0]) for step in range(2)]
    torch.compiler.reset()
    return found


@program
def recomputed_activations(group: Any) -> list[torch.Tensor]:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=False)

    return values(trained(group, DistributedDataParallel(Recomputed(), process_group=group)))


@program
def sharded_by_fsdp1(group: Any) -> list[torch.Tensor]:
    model = FullyShardedDataParallel(
        network(), process_group=group, device_id=torch.device("cpu"), use_orig_params=True
    )
    trained(group, model)
    with FullyShardedDataParallel.summon_full_params(model):
        return values(model)


@program
def sharded_by_fsdp2(group: Any) -> list[torch.Tensor]:
    model = network()
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    trained(group, fully_shard(model, mesh=mesh))
    return [one.full_tensor().detach() for one in model.parameters()]


@program
def sparse_gradients(group: Any) -> list[torch.Tensor]:
    torch.manual_seed(7)
    inner = nn.EmbeddingBag(19, 4, sparse=True, mode="sum").double()
    model = DistributedDataParallel(inner, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        places = torch.arange(3 + dist.get_rank(group)) * (step + 2) % 19
        optimizer.zero_grad()
        model(places.view(1, -1)).square().sum().backward()
        optimizer.step()
    return values(model)


@program
def sparse_sum(group: Any) -> list[torch.Tensor]:
    rank = dist.get_rank(group)
    places = torch.tensor([[rank, 3, 3], [1, rank, 2]])
    mine = torch.sparse_coo_tensor(places, torch.arange(3.0) + rank, (9, 9), check_invariants=True)
    dist.all_reduce(mine, group=group)
    return [mine.to_dense()]


@program
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


@program
def half_precision_builtin_hook(group: Any) -> list[torch.Tensor]:
    model = wrapped(group)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return values(trained(group, model))


@program
def half_precision_hook(group: Any) -> list[torch.Tensor]:
    model = wrapped(group)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return values(trained(group, model))


@program
def power_sgd_hook(group: Any) -> list[torch.Tensor]:
    model = wrapped(group)
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return values(trained(group, model))


@program
def loader_with_workers(group: Any) -> list[torch.Tensor]:
    """The samples that a rank got, and a mean over all ranks."""
    data = TensorDataset(torch.arange(23, dtype=torch.float64))
    sampler = DistributedSampler(data, dist.get_world_size(group), dist.get_rank(group), shuffle=True, seed=3)
    got = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        got += [x for (x,) in DataLoader(data, batch_size=4, sampler=sampler, num_workers=epoch)]
    mine = torch.cat(got)
    mean = mine.sum()
    dist.all_reduce(mean, group=group)
    return [mine, mean]


@program
def coalesced_gather(group: Any) -> list[torch.Tensor]:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = [torch.full((2, 3), 10.0 * rank + place + 1) for place in range(size)]  # as many tensors as ranks
    outputs = [[torch.empty(2, 3) for _ in mine] for _ in range(size)]
    dist.all_gather_coalesced(outputs, mine, group=group)
    return [tensor for of_rank in outputs for tensor in of_rank]


@program
def objects(group: Any) -> list[torch.Tensor]:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "long": "x" * (rank * 1000)}, group=group)
    lists = [[rank, "first"] if rank == 0 else None]
    dist.broadcast_object_list(lists, src=0, group=group)
    return [torch.tensor([one["rank"] + 1, len(one["long"]), lists[0][0]]) for one in gathered]


@pytest.fixture(scope="module")
def gloo() -> Iterator[Any]:
    made = dist.new_group(backend="gloo")
    yield made
    dist.destroy_process_group(made)


@pytest.mark.parametrize("run", PROGRAMS, ids=lambda one: one.__name__)
def test_values_are_those_of_gloo(world: World, gloo: Any, ours: None, run: Program) -> None:
    skip_alone(world)
    wanted, found = run(gloo), run(dist.group.WORLD)
    assert len(found) == len(wanted) > 0
    # Half the bits of a double, where fp16 rounds; PowerSGD's orthogonal basis makes a rounding larger.
    bound = 0.0 if world.size <= 2 else 1e-3 if "half_precision" in run.__name__ else 1e-10
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    assert any(one.abs().sum() > 0 for one in found)
