"""A line tells that each rank has trained a model of its own from equal parameters, and only then."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpitrain.torch
from mpitrain import World
from mpitrain.reducer.unexchanged import tell_of_unexchanged
from mpitrain.torch import own_steps

from .common import nightly

pytestmark = pytest.mark.usefixtures("group", "several")
STEPS = 9
# Beyond 32 MiB the C library gives memory back at once: what reads it there ends the process.
LARGE = 3000


@pytest.fixture(autouse=True)
def forgets(several: None) -> Iterator[None]:
    for kept in (own_steps._in_order, own_steps._watched):
        kept.clear()
    yield
    for kept in (own_steps._in_order, own_steps._watched):
        kept.clear()


@pytest.fixture
def told(world: World, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What rank 0 prints when all have ended."""

    def end() -> str:
        own_steps._tell()
        tell_of_unexchanged(world, dict(enumerate(world.allgather(world.control.notes._last_values()))))
        return str(world.broadcast_object(capsys.readouterr().out))

    return end


def batch(world: World, step: int, size: int = 10) -> Any:
    return torch.randn(8, size, generator=torch.Generator().manual_seed(1000 * step + world.rank))


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10))


def average(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def sgd(model: Any, rate: float = 0.1) -> Any:
    return torch.optim.SGD(model.parameters(), lr=rate)


def train(
    world: World,
    model: Any = None,
    optimizer: Any = None,
    *,
    steps: int = STEPS,
    data: Callable[[World, int], Any] = batch,
    before: Callable[[Any], object] = lambda model: None,
    after: Callable[[Any, int], object] = lambda model, step: None,
) -> Any:
    """A loop, with something before and after each step of the optimizer."""
    model = plain() if model is None else model
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(world, step)).square().mean().backward()
        before(model)
        optimizer.step()
        after(model, step)
    return model


# -- each rank for itself --------------------------------------------------------------------------------------------


def with_evaluation(world: World) -> None:
    """Predictions are gathered after each epoch of four steps."""
    parts = [torch.empty(100) for _ in range(world.size)]
    train(world, after=lambda model, step: step % 4 == 3 and dist.all_gather(parts, torch.ones(100)))


def narrow(world: World) -> None:
    model = plain().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    train(world, model, optimizer, data=lambda world, step: batch(world, step).bfloat16())


def with_a_closure(world: World) -> None:
    model = plain()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = model(batch(world, step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def channels_last(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)).to(memory_format=torch.channels_last)
    train(world, model, data=lambda world, step: batch(world, step, 192).view(8, 3, 8, 8))


def compiled(world: World) -> None:
    torch.compiler.reset()
    model = plain()
    optimizer = sgd(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(world, model, optimizer)
    torch.compiler.reset()


TOLD: dict[str, Callable[[World], object]] = {
    "alone": train,
    # The loss of every step is averaged, as a progress bar shows it.
    "with metrics": lambda world: train(world, after=lambda model, step: dist.all_reduce(torch.ones(1))),
    "with evaluation": with_evaluation,
    "narrow": narrow,
    "with a closure": with_a_closure,
    "channels last": channels_last,
    "of unequal lengths": lambda world: train(world, steps=STEPS + 3 * world.rank),
    "compiled": compiled,
}


@pytest.mark.parametrize("name", [*list(TOLD)[:-1], *nightly("compiled")])
def test_a_line_tells(world: World, told: Callable[[], str], name: str) -> None:
    TOLD[name](world)
    line = told()
    assert line.startswith(f"mpitrain: {world.size} ranks have each trained a separate model: "), line
    assert line.count("\n") == 1
    assert "steps on rank 0 on " in line


# -- what is meant ---------------------------------------------------------------------------------------------------


def prepared(world: World) -> None:
    model = plain()
    data: Any = [torch.randn(8, 10, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    model, optimizer, data = mpitrain.torch.prepare(model, sgd(model), data)
    for part in data:
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()


def averaged_by_hand(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def averaged_through_world(model: Any) -> None:
    means = mpitrain.init().mean({name: one.grad.numpy() for name, one in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.grad.copy_(torch.from_numpy(means[name]))


def averaged_at_the_end_alive(world: World) -> None:
    model = plain()
    kept.append(sgd(model))
    average(train(world, model, kept[0]))


def averaged_in_a_hook(world: World) -> None:
    model = plain()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: average(model))
    train(world, model, optimizer)


def one_learner(world: World) -> None:
    """The learner sends its parameters to the actors now and then."""
    model = plain()
    optimizer = sgd(model)
    for _ in range(STEPS):
        if world.rank == 0:
            train(world, model, optimizer, steps=1)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


def adversaries(world: World) -> None:
    """Both networks of a GAN, wrapped."""
    pair = [DistributedDataParallel(plain()), DistributedDataParallel(plain(1))]
    optimizers = [torch.optim.Adam(one.parameters()) for one in pair]
    for _ in range(STEPS):
        for model, optimizer in zip(pair, optimizers, strict=True):
            train(world, model, optimizer, steps=1)


def pipeline(world: World) -> None:
    """Each rank has a stage of equal shape and equal first values; activations and their gradients go between them."""
    stage = plain()
    optimizer = sgd(stage)
    last = world.size - 1
    for step in range(STEPS):
        optimizer.zero_grad()
        entered = batch(world, step)
        if world.rank:
            dist.recv(entered, world.rank - 1)
        entered.requires_grad_()
        left = stage(entered)
        if world.rank == last:
            left.square().mean().backward()
        else:
            dist.send(left.detach(), world.rank + 1)
            gradient = torch.empty_like(left)
            dist.recv(gradient, world.rank + 1)
            left.backward(gradient)
        if world.rank:
            dist.send(entered.grad, world.rank - 1)
        optimizer.step()


def tensor_parallel(world: World) -> None:
    """Each rank has a part of the features, with equal first values; the sum goes over all ranks in each pass."""
    torch.manual_seed(0)
    part = nn.Linear(10, 12)
    optimizer = sgd(part)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = part(batch(world, step))
        total = own.detach().clone()
        dist.all_reduce(total)
        (own * total).mean().backward()
        optimizer.step()


def sharded(world: World) -> None:
    train(world, fully_shard(plain(), mesh=init_device_mesh("cpu", (world.size,))))


def two_groups(world: World) -> None:
    """Pairs of ranks train one model each, from equal parameters."""
    groups = [dist.new_group([one for one in range(world.size) if one % 2 == odd]) for odd in range(2)]
    if world.size > 2:
        train(world, DistributedDataParallel(plain(), process_group=groups[world.rank % 2]))


def with_resized_memory(world: World) -> None:
    """As libraries do that move parameters away; nothing is told then."""
    model = train(world)
    model[2].bias.grad = None
    model[2].bias.data.untyped_storage().resize_(0)


class OfNewMemory(torch.optim.SGD):
    """Gives its parameters new memory in each step, and the old one back to the system."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def large_ones(world: World) -> Any:
    """By an optimizer that gives them new memory; and by one that goes when they have got new memory."""
    model = nn.Linear(LARGE, LARGE, bias=False)
    train(world, model, OfNewMemory(model.parameters()), steps=2, data=lambda world, step: batch(world, step, LARGE))
    model = nn.Linear(LARGE, LARGE, bias=False)
    optimizer = sgd(model)
    train(world, model, optimizer, steps=2, data=lambda world, step: batch(world, step, LARGE)).half()
    del optimizer
    gc.collect()
    assert not own_steps._watched


kept: list[Any] = []
QUIET: dict[str, Callable[[World], object]] = {
    "wrapped": lambda world: train(world, DistributedDataParallel(plain(world.rank))),
    "wrapped from equal": lambda world: train(world, DistributedDataParallel(plain())),
    "prepared": prepared,
    "averaged by hand": lambda world: train(world, before=averaged_by_hand),
    "averaged through World": lambda world: train(world, before=averaged_through_world),
    # Cross-validation or an ensemble: each rank begins with values of its own.
    "folds": lambda world: train(world, plain(world.rank)),
    "sweep": lambda world: train(world, model := plain(), sgd(model, 0.1 / (1 + world.rank))),
    "the same data": lambda world: train(world, data=lambda _, step: torch.full((2, 10), float(step))),
    # Averages every third step, and not at the end.
    "local SGD": lambda world: train(world, after=lambda model, step: step % 3 == 1 and average(model)),
    "averaged at the end": lambda world: average(train(world)),
    "averaged at the end, alive": averaged_at_the_end_alive,
    "averaged in a hook": averaged_in_a_hook,
    "one learner": one_learner,
    "adversaries": adversaries,
    "pipeline": pipeline,
    "tensor parallel": tensor_parallel,
    "sharded": sharded,
    "two groups": two_groups,
    "one step": lambda world: train(world, steps=1),
    "resized memory": with_resized_memory,
    "large ones of new memory": large_ones,
}


@pytest.mark.parametrize("name", QUIET)
def test_no_line(world: World, told: Callable[[], str], name: str) -> None:
    QUIET[name](world)
    assert told() == ""
    kept.clear()
