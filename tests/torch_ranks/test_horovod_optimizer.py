"""DistributedOptimizer and broadcasts of mpitrain.horovod.torch, against one process in float64."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import mpitrain.horovod.torch as hvd
from mpitrain import World
from tests.ranks.common import skip_alone

pytestmark = pytest.mark.usefixtures("horovod")


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def alone(world: World, net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, passes: int = 1) -> None:
    """The same training in one process: the mean of the ranks' losses."""
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            losses = [loss_of(net, batch(passes * step + one, rank)) for rank in range(world.size)]
            (sum(losses) / world.size).backward()  # type: ignore[union-attr]
        optimizer.step()


def assert_close(net: torch.nn.Module, other: torch.nn.Module, bound: float = 1e-12) -> None:
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=bound)
    assert len({value.tobytes() for value in hvd.allgather_object(next(net.parameters()).detach().numpy())}) == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "passes": {"backward_passes_per_step": 3},
    "a predivide factor": {"gradient_predivide_factor": 4.0},
    "two groups": {"groups": 2},
    "groups of parameters": {"groups": [[0, -1]]},
    "half the bytes": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_like_one_process(world: World, name: str) -> None:
    """float16 rounds by up to 2^-11 of gradients below 1, at each rank and in each of the sums."""
    options, is_half = dict(OPTIONS[name]), name == "half the bytes"
    passes = options.get("backward_passes_per_step", 1)
    steps, momentum = (1, 0.0) if is_half else (4, 0.9)
    net, other = model(), model()
    if name == "groups of parameters":
        options["groups"] = [[[*net.parameters()][place] for place in group] for group in options["groups"]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum), net.named_parameters(), **options
    )
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            loss_of(net, batch(passes * step + one, world.rank)).backward()
        optimizer.step()
    alone(world, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=momentum), steps, passes)
    assert_close(net, other, 0.1 * world.size * 2**-10 if is_half else 1e-12)
    if is_half:
        with pytest.raises(AssertionError):
            assert_close(net, other, 1e-12)


def test_a_closure_and_a_schedule_made_before(world: World) -> None:
    net, other = model(), model()
    inner = torch.optim.SGD(net.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    plain = torch.optim.SGD(other.parameters(), lr=0.2)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch(step, world.rank))
            loss.backward()
            return loss

        optimizer.step(closure)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule.step()
        plain.zero_grad()
        (sum(loss_of(other, batch(step, rank)) for rank in range(world.size)) / world.size).backward()  # type: ignore
        plain.step()
        plain.param_groups[0]["lr"] *= 0.5
    assert_close(net, other)


def test_a_rank_without_a_gradient_and_a_synchronize(world: World) -> None:
    net, other = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    inputs = batch(0, 0)
    last = world.size - 1
    (net(inputs) if world.rank == last else net[0](inputs)).sum().backward()  # type: ignore[index]
    optimizer.synchronize()
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-1, 1)
    with optimizer.skip_synchronize():
        optimizer.step()
    plain = torch.optim.SGD(other.parameters(), lr=1.0)
    losses = [(other(inputs) if rank == last else other[0](inputs)).sum() for rank in range(world.size)]  # type: ignore
    (sum(losses) / world.size).backward()
    for parameter in other.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-1, 1)
    plain.step()
    assert_close(net, other)


def test_sparse_gradients(world: World) -> None:
    for as_dense in (False, True):
        net = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            net.weight.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), sparse_as_dense=as_dense)
        net(torch.tensor([world.rank % 5, 5])).sum().backward()
        optimizer.step()
        wanted = torch.ones(6, dtype=torch.float64)
        for rank in range(world.size):
            wanted[rank % 5] -= 1 / world.size
            wanted[5] -= 1 / world.size
        assert torch.allclose(net.weight[:, 0], wanted, rtol=0, atol=1e-12)


def test_a_rank_without_a_sparse_gradient(world: World) -> None:
    """It sends zeros. Ranks with a sparse gradient can take them if they send theirs as a dense one."""
    skip_alone(world)
    net = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    torch.nn.init.ones_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), sparse_as_dense=True)
    if not world.is_root:
        net(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert net.weight[:, 0].tolist() == pytest.approx([1.0] * 5 + [1 / world.size], abs=1e-12)
    net = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    if not world.is_root:
        net(torch.tensor([5])).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="must be equal in: gradients") as caught:
        optimizer.step()
    assert caught.value.known_everywhere
    torch.nn.init.ones_(net.weight)
    optimizer.zero_grad()
    net(torch.tensor([5])).sum().backward()
    optimizer.step()  # the failed step has left nothing behind
    assert net.weight[:, 0].tolist() == [1.0] * 5 + [0.0]


def test_adasum_of_what_the_ranks_would_change(world: World) -> None:
    """One parameter changes alike on all ranks; the ranks' changes of the other one are summed. Exactly."""
    alike, own = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(7))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([alike, own, frozen], lr=0.5), op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        (alike.sum() + own[world.rank] * 2.0 ** (world.rank + 1)).backward()
        optimizer.step()
    assert alike.tolist() == [-1.0, -1.0]
    assert own.tolist() == [1 - 2 * 2.0**rank * (rank < world.size) for rank in range(7)]


def test_only_the_ranks_of_a_set_exchange(world: World) -> None:
    skip_alone(world)
    process_set = hvd.add_process_set(range(1, world.size))
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), process_set=process_set)
    net(torch.tensor([float(world.rank)])).sum().backward()
    optimizer.step()
    assert net.weight.item() == (0.0 if world.is_root else -world.size / 2)
    hvd.remove_process_set(process_set)


def test_what_an_optimizer_refuses(world: World) -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    named = list(net.named_parameters())
    for wrong, word in (
        ({"named_parameters": named[:1]}, "no name for 3 of 4"),
        ({"named_parameters": [("a", one) for _, one in named]}, "more than once: a"),
        ({"named_parameters": [one for _, one in named]}, "pairs"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=Average only"),
        ({"groups": [[named[0][1]], [named[0][1]]]}, "more than once"),
        ({"process_set": hvd.ProcessSet([0])}, "add_process_set first"),
    ):
        with pytest.raises(ValueError, match=word) as caught:
            hvd.DistributedOptimizer(inner, **wrong)  # type: ignore[arg-type]
        assert str(caught.value).startswith(world.name())
    optimizer = hvd.DistributedOptimizer(inner, named)
    loss_of(net, batch(0, world.rank)).backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than 1 times"):
        loss_of(net, batch(0, world.rank)).backward()
    optimizer.synchronize()


def test_broadcast_parameters_state_and_objects(world: World) -> None:
    """A rank that goes on from a checkpoint hands its state to ranks that have none."""
    net = model(world.rank)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 / (world.rank + 1), betas=(0.5 + 0.1 * world.rank, 0.99))
    if world.is_root:
        loss_of(net, batch(0, 0)).backward()
        optimizer.step()
    wanted = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    of_root = hvd.broadcast_object(wanted, 0)
    state = optimizer.state_dict()
    assert state["param_groups"] == of_root["param_groups"]
    for number, values in of_root["state"].items():
        for key, value in values.items():
            assert torch.equal(state["state"][number][key], value)
    assert len({value.tobytes() for value in hvd.allgather_object(next(net.parameters()).detach().numpy())}) == 1
    # Objects of another length, and of another type, on each rank.
    kinds = [{"epoch": 3}, None, "text", [None] * 7]
    assert hvd.allgather_object(kinds[world.rank % 4]) == [kinds[rank % 4] for rank in range(world.size)]
    for root in range(world.size):
        assert hvd.broadcast_object(kinds[world.rank % 4], root) == kinds[root % 4]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("is_added", [True, False])
def test_parameters_that_come_later(world: World, is_added: bool, op: int) -> None:
    """As in one process, if they are added to the optimizer, or require a gradient, only after some steps."""
    net, other = model(), model()
    for one in (net, other):
        one[2].requires_grad_(is_added)  # type: ignore[operator]
    given = [one[0] if is_added else one for one in (net, other)]  # type: ignore[index]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(given[0].parameters(), lr=0.1), op=op)
    plain = torch.optim.SGD(given[1].parameters(), lr=0.1)
    for step in range(4):
        for one, its in ((net, optimizer), (other, plain)):
            if step == 2 and is_added:
                its.add_param_group({"params": list(one[2].parameters())})  # type: ignore[index]
            one[2].requires_grad_(is_added or step >= 2)  # type: ignore[operator]
        optimizer.zero_grad()
        loss_of(net, batch(0, world.rank)).backward()
        optimizer.step()
        alone(world, other, plain, 1)
    if op == hvd.Average:
        assert_close(net, other)
    assert len({value.tobytes() for value in hvd.allgather_object(net[2].weight.detach().numpy())}) == 1
