"""A line tells that each rank has trained a model of its own from equal parameters, and only then."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpitrain import World
from tests.ranks.common import skip_alone

from .prepared import torch

import torch.distributed as dist  # isort: skip (the line above skips this file where there is no PyTorch)
from torch import nn  # isort: skip
from torch.nn.parallel import DistributedDataParallel  # isort: skip

import mpitrain.torch  # isort: skip
from mpitrain.reducer.unexchanged import tell_of_unexchanged  # isort: skip
from mpitrain.torch import own_steps  # isort: skip

pytestmark = pytest.mark.usefixtures("group", "ours")

STEPS = 9


@pytest.fixture(autouse=True)
def forgets(world: World) -> Iterator[None]:
    skip_alone(world)
    own_steps._in_order.clear()
    own_steps._watched.clear()
    yield
    own_steps._in_order.clear()
    own_steps._watched.clear()


@pytest.fixture
def told(world: World, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What rank 0 prints when all have ended."""

    def end() -> str:
        own_steps._tell()
        tell_of_unexchanged(world, dict(enumerate(world.allgather(dict(world.control.notes.final)))))
        return str(world.broadcast_object(capsys.readouterr().out))

    return end


def batch(world: World, step: int, size: int = 10) -> Any:
    return torch.randn(8, size, generator=torch.Generator().manual_seed(1000 * step + world.rank))


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10))


def usual(world: World, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(world, step)).square().mean().backward()
    optimizer.step()


def train(world: World, model: Any, between: Callable[[Any, int], object] = lambda model, step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        usual(world, model, optimizer, step)
        between(model, step)


def average(model: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


# -- each rank for itself ----------------------------------------------------------------------------------------------


def alone(world: World) -> None:
    train(world, plain())


def with_metrics(world: World) -> None:
    """The loss of every step is averaged, as a progress bar shows it."""
    train(world, plain(), lambda model, step: dist.all_reduce(torch.ones(1)))


def with_evaluation(world: World) -> None:
    """Predictions are gathered after each epoch of four steps."""
    parts = [torch.empty(100) for _ in range(world.size)]
    train(world, plain(), lambda model, step: step % 4 == 3 and dist.all_gather(parts, torch.ones(100)))


def narrow(world: World) -> None:
    model = plain().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(world, step).bfloat16()).square().mean().backward()
        optimizer.step()


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(world, step, 192).view(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()


def unequal_lengths(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS + 3 * world.rank):
        usual(world, model, optimizer, step)


# -- what is meant -----------------------------------------------------------------------------------------------------


def wrapped(world: World) -> None:
    train(world, DistributedDataParallel(plain(world.rank)))


def wrapped_from_equal(world: World) -> None:
    train(world, DistributedDataParallel(plain()))


def prepared(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = [torch.randn(8, 10, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data)
    for part in data:
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()


def averaged_by_hand(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
        optimizer.step()


def averaged_through_world(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        means = world.mean({name: one.grad.numpy() for name, one in model.named_parameters()})
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(torch.from_numpy(means[name]))
        optimizer.step()


def folds(world: World) -> None:
    """Cross-validation or an ensemble: each rank begins with values of its own."""
    train(world, plain(world.rank))


def sweep(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + world.rank))
    for step in range(STEPS):
        usual(world, model, optimizer, step)


def same_data(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((2, 10), float(step))).square().mean().backward()
        optimizer.step()


def local_sgd(world: World) -> None:
    """Averages every third step, and not at the end."""
    train(world, plain(), lambda model, step: average(model) if step % 3 == 1 else None)


def averaged_at_the_end(world: World) -> None:
    model = plain()
    train(world, model)
    average(model)


def averaged_at_the_end_alive(world: World) -> None:
    model = plain()
    kept.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        usual(world, model, kept[0], step)
    average(model)


def averaged_in_a_hook(world: World) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: average(model))
    for step in range(STEPS):
        usual(world, model, optimizer, step)


def one_learner(world: World) -> None:
    """The learner sends its parameters to the actors now and then."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if world.rank == 0:
            usual(world, model, optimizer, step)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


def adversaries(world: World) -> None:
    """Both networks of a GAN, wrapped."""
    pair = [DistributedDataParallel(plain()), DistributedDataParallel(plain(1))]
    optimizers = [torch.optim.Adam(one.parameters()) for one in pair]
    for step in range(STEPS):
        for model, optimizer in zip(pair, optimizers, strict=True):
            usual(world, model, optimizer, step)


def pipeline(world: World) -> None:
    """Each rank has a stage of equal shape and equal first values; activations and their gradients go between them."""
    stage = plain()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
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
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = part(batch(world, step))
        with torch.no_grad():
            total = own.clone()
            dist.all_reduce(total)
        (own * total).mean().backward()
        optimizer.step()


def sharded(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    train(world, model)


def two_groups(world: World) -> None:
    """Pairs of ranks train one model each, from equal parameters."""
    groups = [dist.new_group([one for one in range(world.size) if one % 2 == odd]) for odd in range(2)]
    if world.size < 3:
        return
    model = DistributedDataParallel(plain(), process_group=groups[world.rank % 2])
    train(world, model)


def one_step(world: World) -> None:
    usual(world, model := plain(), torch.optim.SGD(model.parameters(), lr=0.1), 0)


kept: list[Any] = []


@pytest.mark.parametrize(
    "program", [alone, with_metrics, with_evaluation, narrow, with_a_closure, channels_last, unequal_lengths]
)
def test_a_line_tells(world: World, told: Callable[[], str], program: Callable[[World], None]) -> None:
    program(world)
    line = told()
    assert line.startswith(f"mpitrain: {world.size} ranks have each trained a model of their own: "), line
    assert line.count("\n") == 1
    assert "steps on rank 0 on " in line


@pytest.mark.parametrize(
    "program",
    [
        wrapped,
        wrapped_from_equal,
        prepared,
        averaged_by_hand,
        averaged_through_world,
        folds,
        sweep,
        same_data,
        local_sgd,
        averaged_at_the_end,
        averaged_at_the_end_alive,
        averaged_in_a_hook,
        one_learner,
        adversaries,
        pipeline,
        tensor_parallel,
        sharded,
        two_groups,
        one_step,
    ],
)
def test_no_line(world: World, told: Callable[[], str], program: Callable[[World], None]) -> None:
    program(world)
    assert told() == ""
    kept.clear()


def test_memory_can_be_resized(world: World, told: Callable[[], str]) -> None:
    """As libraries do that move parameters away; nothing is told then."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        usual(world, model, optimizer, step)
    model[2].bias.grad = None
    model[2].bias.data.untyped_storage().resize_(0)
    assert told() == ""


class OfNewMemory(torch.optim.SGD):
    """Gives its parameters new memory in each step, and the old one back to the system."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


# Beyond 32 MiB the C library gives memory back at once: what reads it there ends the process.
LARGE = 3000


def test_an_optimizer_may_give_parameters_new_memory(world: World, told: Callable[[], str]) -> None:
    model = nn.Linear(LARGE, LARGE, bias=False)
    optimizer = OfNewMemory(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(batch(world, step, LARGE)).square().mean().backward()
        optimizer.step()
    assert told() == ""


def test_parameters_may_have_new_memory_when_their_optimizer_goes(world: World, told: Callable[[], str]) -> None:
    model = nn.Linear(LARGE, LARGE, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(world, step, LARGE)).square().mean().backward()
        optimizer.step()
    model.half()
    del optimizer
    gc.collect()
    assert not own_steps._watched
    assert told() == ""


def test_a_compiled_step(world: World, told: Callable[[], str]) -> None:
    torch.compiler.reset()
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        step_compiled()
    assert told().count("\n") == 1
    torch.compiler.reset()
