"""What makes replicas differ under DistributedOptimizer is refused, on all ranks; and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpitrain.horovod.torch as hvd
from mpitrain import World
from mpitrain.errors import MismatchError
from mpitrain.reducer.checks import check_final
from tests.ranks.common import error_on_all, skip_alone

from .prepared import assert_equal_everywhere

pytestmark = pytest.mark.usefixtures("begun")

# Does one batch. Gets the model, its optimizer, the loss, and whether this is the batch, on the last rank, to deviate.
Step = Callable[[Any, Any, Callable[[], Any], bool], None]


@pytest.fixture(scope="module")
def begun(world: World) -> Iterator[None]:
    del world
    hvd.init()
    yield
    hvd.shutdown()


def usual(model: Any, optimizer: Any, loss: Callable[[], Any], _: bool, then: Any = lambda: None) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.synchronize()
    then()
    with optimizer.skip_synchronize():
        optimizer.step()


def changed(change: Callable[[Any], object]) -> Step:
    """On one rank, something is done between synchronize() and step()."""
    return lambda model, optimizer, loss, odd: usual(
        model, optimizer, loss, odd, (lambda: change(model[2].bias)) if odd else (lambda: None)
    )


def skipped(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        if not odd:
            optimizer.step()


def twice(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    usual(model, optimizer, loss, odd)
    with optimizer.skip_synchronize():
        if odd:
            optimizer.step()


def own_gradients(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    def change() -> None:
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss(), model.parameters()), strict=True
        ):
            parameter.grad = gradient

    usual(model, optimizer, loss, odd, change)


def other_rate(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5 if odd else 1
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def in_closure(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.synchronize()
        if odd:
            model[0].weight.grad.zero_()
        return value

    with optimizer.skip_synchronize():
        optimizer.step(closure)


def removed(parameter: Any) -> None:
    parameter.grad = None


REFUSED: dict[str, tuple[Step, str]] = {
    "a skipped step": (skipped, "has made 1 steps of the optimizer, "),
    "a step twice": (twice, "steps of the optimizer, "),
    "autograd.grad": (own_gradients, "a number of the gradient of"),
    "zeroed": (changed(lambda p: p.grad.zero_()), "the gradient of 2.bias: "),
    "zeroed through data": (changed(lambda p: p.grad.data.zero_()), "a number of the gradient of 2.bias"),
    "replaced": (changed(lambda p: setattr(p, "grad", 2 * p.grad)), "the gradient of 2.bias: "),
    "removed": (changed(removed), "there is none"),
    "another rate": (other_rate, "learning rates"),
    "in a closure": (in_closure, "the gradient of 0.weight: "),
}


def made(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters())


def train(world: World, step: Step, steps: int = 4, model_of: Callable[[], tuple[Any, Any]] = made) -> Any:
    model, optimizer = model_of()
    for number in range(steps):
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + world.rank))
        odd = number == 1 and world.rank == world.size - 1
        step(model, optimizer, lambda x=x: model(x).square().mean(), odd)  # type: ignore[misc]
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(world: World, name: str) -> None:
    skip_alone(world)
    step, text = REFUSED[name]
    found = error_on_all(world, MismatchError, lambda: train(world, step))
    assert text in found, found


@pytest.mark.parametrize("name", ["a skipped step", "zeroed", "replaced"])
def test_a_difference_that_is_caught_is_said_once(world: World, name: str) -> None:
    """The program goes on, with a step by the gradients of the exchange that has told it."""
    skip_alone(world)
    model, optimizer = made()
    caught = []
    for number in range(5):
        x = torch.randn(4, 5, dtype=torch.float64)
        if number == 1:
            REFUSED[name][0](model, optimizer, lambda x=x: model(x).square().mean(), world.rank == world.size - 1)  # type: ignore[misc]
            continue
        optimizer.zero_grad(set_to_none=False)  # the tensors that a rank has changed once more stay
        model(x).square().mean().backward()
        try:
            optimizer.synchronize()
        except MismatchError:
            caught.append(number)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert caught == [2]
    final = world.control.notes.final
    ends = world.allgather({number: values for number, values in final.items() if number > 0})  # of models
    check_final(world, dict(enumerate(ends)))
    assert ends[0]  # they have compared the steps that came later


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_without_synchronize(world: World, is_first: bool) -> None:
    """It would use this rank's own gradients."""
    skip_alone(world)
    model, optimizer = made()
    if not is_first:
        train(world, usual, 1, lambda: (model, optimizer))
    optimizer.zero_grad()
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    with (
        pytest.raises(AssertionError, match=r"call optimizer.synchronize\(\) after backward"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    optimizer.synchronize()


def clipped(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    usual(model, optimizer, loss, odd, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def scaler(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(loss() * (float("inf") if odd else 1)).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def twice_everywhere(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    twice(model, optimizer, loss, odd=True)


def closure(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    in_closure(model, optimizer, loss, odd=False)


def looked_at(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    """One rank looks at gradients, and makes a step without any."""
    if odd:
        optimizer.zero_grad()
        with optimizer.skip_synchronize():
            optimizer.step()
    usual(model, optimizer, loss, odd, lambda: [p.grad.norm().item() for p in model.parameters()] if odd else None)


@pytest.mark.parametrize("step", [usual, clipped, scaler, twice_everywhere, closure, looked_at])
def test_right_programs_are_not_refused(world: World, step: Step) -> None:
    assert_equal_everywhere(world, train(world, step))


def test_uneven_steps_end_with_join(world: World) -> None:
    """Also with a learning rate that changes with each step, and in a second epoch without a broadcast."""
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        for _ in range(2 + world.rank):
            usual(model, optimizer, lambda: model(torch.ones(2, 5, dtype=torch.float64)).sum(), False)
            schedule.step()
        hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_equal_everywhere(world, model)


def test_a_state_that_one_rank_loads(world: World) -> None:
    model, optimizer = made()
    train(world, usual, 2, lambda: (model, optimizer))
    if world.is_root:
        optimizer.load_state_dict(optimizer.state_dict())
    train(world, usual, 2, lambda: (model, optimizer))
    assert_equal_everywhere(world, model)
