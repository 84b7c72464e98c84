"""DistributedOptimizer and broadcasts of mpitrain.horovod.torch, against one process in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import mpitrain.horovod.torch as hvd
from mpitrain import World
from mpitrain.errors import MismatchError
from tests.ranks.common import error_on_all, skip_alone

pytestmark = pytest.mark.usefixtures("horovod")


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def train(net: Any, optimizer: Any, ranks: Iterable[int], steps: Iterable[int], passes: int = 1) -> None:
    """With the batches of this rank; or, without Horovod, of all ranks: the mean of their losses."""
    ranks = [*ranks]
    for step in steps:
        optimizer.zero_grad()
        for one in range(passes):
            (sum(loss_of(net, batch(passes * step + one, rank)) for rank in ranks) / len(ranks)).backward()
        optimizer.step()


def assert_close(net: torch.nn.Module, other: torch.nn.Module, bound: float = 1e-12) -> None:
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=bound)
    assert len({value.tobytes() for value in hvd.allgather_object(next(net.parameters()).detach().numpy())}) == 1


@pytest.mark.parametrize(
    ("options", "steps", "bound"),
    [
        ({}, 4, 1e-12),
        ({"backward_passes_per_step": 3}, 4, 1e-12),
        ({"gradient_predivide_factor": 4.0}, 4, 1e-12),
        ({"groups": 2}, 4, 1e-12),
        ({"groups": "of the first and the last parameter"}, 4, 1e-12),
        # float16 rounds by up to 2^-11 of gradients below 1, at each rank and in each of the sums.
        ({"compression": hvd.Compression.fp16}, 1, 0.1 * 2**-10),
    ],
    ids=lambda one: "-".join(one) or "default" if isinstance(one, dict) else "",
)
def test_like_one_process(world: World, options: dict[str, Any], steps: int, bound: float) -> None:
    passes = options.get("backward_passes_per_step", 1)
    net, other = model(), model()
    first, *_, last = net.parameters()
    given = options | ({"groups": [[first, last]]} if isinstance(options.get("groups"), str) else {})
    inner, plain = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (net, other))
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), **given)
    assert isinstance(optimizer, torch.optim.SGD)
    train(net, optimizer, [world.rank], range(steps), passes)
    train(other, plain, range(world.size), range(steps), passes)
    assert_close(net, other, bound * world.size)
    if "compression" in options:
        with pytest.raises(AssertionError):
            assert_close(net, other, 1e-12)


def test_a_closure_and_a_schedule_made_before(world: World) -> None:
    net, other = model(), model()
    inner, plain = (torch.optim.SGD(one.parameters(), lr=0.2) for one in (net, other))
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
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
        train(other, plain, range(world.size), [step])
        plain.param_groups[0]["lr"] *= 0.5
    assert_close(net, other)


def test_a_rank_without_a_gradient_and_a_synchronize(world: World) -> None:
    net, other = model(), model()
    inner, plain = (torch.optim.SGD(one.parameters(), lr=1.0) for one in (net, other))
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    inputs, last = batch(0, 0), world.size - 1

    def own_loss(net: Any, rank: int) -> torch.Tensor:
        return (net(inputs) if rank == last else net[0](inputs)).sum()

    own_loss(net, world.rank).backward()
    optimizer.synchronize()
    (sum(own_loss(other, rank) for rank in range(world.size)) / world.size).backward()
    for one in (net, other):
        torch.nn.utils.clip_grad_value_(one.parameters(), 1)
    with optimizer.skip_synchronize():
        optimizer.step()
    plain.step()
    assert_close(net, other)


def embedding(**options: Any) -> tuple[Any, Any]:
    net = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    torch.nn.init.ones_(net.weight)
    return net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), **options)


def test_sparse_gradients(world: World) -> None:
    """A rank without one sends zeros. Ranks with one can take them if they send theirs as a dense one."""
    for as_dense in (False, True):
        net, optimizer = embedding(sparse_as_dense=as_dense)
        net(torch.tensor([world.rank % 5, 5])).sum().backward()
        optimizer.step()
        wanted = torch.ones(6, dtype=torch.float64)
        for rank in range(world.size):
            wanted[[rank % 5, 5]] -= 1 / world.size
        assert torch.allclose(net.weight[:, 0], wanted, rtol=0, atol=1e-12)
    skip_alone(world)
    net, optimizer = embedding(sparse_as_dense=True)
    if not world.is_root:
        net(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert net.weight[:, 0].tolist() == pytest.approx([1.0] * 5 + [1 / world.size], abs=1e-12)
    net, optimizer = embedding()
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
    """A rank that continues from a checkpoint hands its state to ranks that have none."""
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


def later(way: str, one: Any, its: Any) -> None:
    """Let the last layer come into training."""
    new = list(one[2].parameters())
    if way == "added":
        its.add_param_group({"params": new})
    elif way == "appended":
        its.param_groups[0]["params"].extend(new)
    else:
        one[2].requires_grad_(True)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("way", ["added", "appended", "thawed"])
def test_parameters_that_come_later(world: World, way: str, op: int) -> None:
    """As in one process. If they come on one rank alone, all ranks get an error that names them, and can continue."""
    pair: list[Any] = [model(), model()]
    for one in pair:
        one[2].requires_grad_(way != "thawed")
    inner, plain = (torch.optim.SGD((one if way == "thawed" else one[0]).parameters(), lr=0.1) for one in pair)
    optimizer = hvd.DistributedOptimizer(inner, op=op)
    for step in range(4):
        for one, its, ranks in zip(pair, (optimizer, plain), ([world.rank], range(world.size)), strict=True):
            if step == 2:
                later(way, one, its)
            train(one, its, ranks, [0])
    if op == hvd.Average:
        assert_close(*pair)
    assert len({value.tobytes() for value in hvd.allgather_object(pair[0][2].weight.detach().numpy())}) == 1
    if world.size == 1 or way == "appended":
        return
    net = model()
    net[2].requires_grad_(way != "thawed")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net[: 3 if way == "thawed" else 1].parameters(), 0.1), op=op)
    train(net, optimizer, [world.rank], [0])
    if world.rank == world.size - 1:
        later(way, net, optimizer)
    text = error_on_all(world, MismatchError, lambda: train(net, optimizer, [world.rank], [1]))
    names = "noname.2, noname.3" if way == "thawed" else "added.2, added.3"
    assert f"{world.name(world.size - 1)} also exchanges {names}" in text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size
