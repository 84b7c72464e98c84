"""Parameters in parts: FSDP2, FSDP1, DeviceMesh, DTensor, and checkpoints of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict as load_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from mpitrain import World

from .common import CLOSE, nightly, part, samples, train

pytestmark = pytest.mark.usefixtures("group")


def model() -> nn.Sequential:
    """A model with parameters that no number of ranks divides."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)]
    return nn.Sequential(*layers).double()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-3)


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def whole(net: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters in full, on every rank."""
    return {name: parameter.full_tensor().detach().clone() for name, parameter in net.named_parameters()}


def assert_equal_states(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name].detach(), **CLOSE)


def meshes(world: World) -> list[DeviceMesh]:
    """All ranks in a row; and at 4 ranks two copies of two parts each."""
    found = [init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))]
    if world.size == 4:
        found.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    return found


def test_fully_shard_as_one_process(world: World) -> None:
    alone = model()
    train(world, alone, adam(alone), range(3), whole=True)
    for mesh in meshes(world):
        net = sharded(mesh)
        train(world, net, adam(net), range(3), whole=False)
        assert_equal_states(whole(net), dict(alone.named_parameters()))
        assert isinstance(net[0].weight, DTensor)


def test_fully_shard_in_mixed_precision(world: World) -> None:
    """Parameters are gathered, and gradients reduced, in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    net = sharded(meshes(world)[0], mp_policy=policy)
    x, y = samples(world, 0)
    nn.functional.mse_loss(net(part(world, x).bfloat16()).double(), part(world, y)).backward()
    alone = model()
    nn.functional.mse_loss(alone(x), y).backward()
    for found, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        error = (found.grad.full_tensor() - wanted.grad).abs().max()
        assert error <= 0.05 * wanted.grad.abs().max()  # bfloat16 has 8 bits, through three layers


def test_a_mesh_of_two_dimensions(world: World) -> None:
    if world.size != 4:
        pytest.skip("needs four ranks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    assert list(mesh.get_coordinate()) == [world.rank // 2, world.rank % 2]
    value = torch.tensor([float(world.rank)])
    dist.all_reduce(value, group=mesh.get_group("row"))
    assert value.item() == {0: 0 + 2, 1: 1 + 3}[world.rank % 2]
    dist.all_reduce(value, group=mesh["column"].get_group())
    assert value.item() == 6


def test_checkpoints(world: World, shared: Path) -> None:
    """Save a sharded model with its optimizer, load it into a new one, and continue: as if nothing had been."""
    mesh = meshes(world)[-1]
    net = sharded(mesh)
    optimizer = adam(net)
    train(world, net, optimizer, range(2), whole=False)
    parts, of_optimizer = get_state_dict(net, optimizer)
    saving = {"model": parts, "optimizer": of_optimizer}
    checkpoint.save(saving, checkpoint_id=shared / "one")
    other = sharded(mesh)
    its_optimizer = adam(other)
    parts, of_optimizer = get_state_dict(other, its_optimizer)
    loading = {"model": parts, "optimizer": of_optimizer}
    checkpoint.load(loading, checkpoint_id=shared / "one")
    load_state(other, its_optimizer, model_state_dict=loading["model"], optim_state_dict=loading["optimizer"])
    train(world, other, its_optimizer, range(2, 3), whole=False)
    alone = model()
    train(world, alone, adam(alone), range(3), whole=True)
    assert_equal_states(whole(other), dict(alone.named_parameters()))


def test_a_checkpoint_in_the_background(world: World, shared: Path) -> None:
    """Its collectives are called by another thread while this one trains: they need a group of their own."""
    own = dist.new_group()
    net = sharded(meshes(world)[0])
    before = whole(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of shared storage
        state = {"model": get_model_state_dict(net)}
        saved = checkpoint.async_save(state, checkpoint_id=shared / "two", process_group=own)
        train(world, net, adam(net), range(2), whole=False)
        saved.result()
    found = {name: torch.zeros_like(value) for name, value in before.items()}
    checkpoint.load({"model": found}, checkpoint_id=shared / "two")
    assert_equal_states(found, before)
    dist.destroy_process_group(own)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", *nightly("SHARD_GRAD_OP")])
def test_fsdp1(world: World, strategy: str) -> None:
    """It gives back a layer's parameters after each use of them. Against one process with the whole batch."""
    options: Any = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy[strategy]}
    inner, alone = model(), model()
    for place in (0, 2):
        inner[place] = FullyShardedDataParallel(inner[place], use_orig_params=True, **options)
    net = FullyShardedDataParallel(inner, use_orig_params=True, **options)
    train(world, net, adam(net), range(3), whole=False)
    train(world, alone, adam(alone), range(3), whole=True)
    with FullyShardedDataParallel.summon_full_params(net):
        found = [parameter.detach().clone() for parameter in net.parameters()]
    for one, other in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), **CLOSE)
    x, y = (part(world, batch) for batch in samples(world, 9))
    losses = [nn.functional.mse_loss(one(x), y).item() for one in (net, alone)]
    assert abs(losses[0] - losses[1]) <= 1e-12 * losses[1]
