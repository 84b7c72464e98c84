"""prepare() refuses, on all ranks, what would make replicas differ; and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from mpitrain import World
from mpitrain.errors import GradientError, MismatchError, MpitrainError
from tests.ranks.common import error_on_all, skip_alone

from .prepared import assert_equal_everywhere, loader, mlp, sgd, torch

import mpitrain.torch  # isort: skip (the line above skips this file where there is no PyTorch)

# Does one batch. Gets the model, its optimizer, the loss, and whether this is the batch, on the last rank, to deviate.
Step = Callable[[Any, Any, Callable[[], Any], bool], None]


def usual(model: Any, optimizer: Any, loss: Callable[[], Any], _: bool, then: Any = lambda: None) -> None:
    optimizer.zero_grad()
    loss().backward()
    then()
    optimizer.step()


def changed(change: Callable[[Any], object]) -> Step:
    """On one rank, something is done between backward() and step()."""
    return lambda model, optimizer, loss, odd: usual(
        model, optimizer, loss, odd, (lambda: change(model[2].bias)) if odd else (lambda: None)
    )


def skipped(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    optimizer.zero_grad()
    loss().backward()
    if not odd:
        optimizer.step()


def twice(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    usual(model, optimizer, loss, odd)
    if odd:
        optimizer.step()


def own_gradients(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss(), model.parameters()), strict=True):
        parameter.grad = gradient
    optimizer.step()


def own_update(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    gradients = torch.autograd.grad(loss(), model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient)


def scaled_by_loss(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    usual(model, optimizer, loss, odd, lambda: [one.grad.mul_(loss().item()) for one in model.parameters()])


def other_rate(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5 if odd else 1
    usual(model, optimizer, loss, odd)


def in_closure(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if odd:
            model[0].weight.grad.zero_()
        return value

    optimizer.step(closure)


def second(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    usual(model, optimizer, loss, odd)
    if not odd:
        torch.optim.Adam(model[2].parameters()).step()


def frozen(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    model[0].weight.requires_grad_(not odd)
    usual(model, optimizer, loss, odd)


def clamped(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    usual(model, optimizer, loss, odd)
    if odd:
        with torch.no_grad():
            model[2].weight.fill_(3.0)


def removed(parameter: Any) -> None:
    parameter.grad = None


REFUSED: dict[str, tuple[Step, type[MpitrainError], str]] = {
    "a skipped step": (skipped, MismatchError, "has made 1 steps of the optimizer, "),
    "a step twice": (twice, MismatchError, "step of the optimizer without a backward() since"),
    "autograd.grad": (own_gradients, MismatchError, "step 1 of the optimizer: a number of the gradient of 0.weight"),
    "an update by hand": (own_update, MismatchError, "after 0 steps of the optimizer: a number of 0.weight"),
    "zeroed": (changed(lambda p: p.grad.zero_()), MismatchError, "the gradient of 2.bias: "),
    "zeroed through data": (
        changed(lambda p: p.grad.data.zero_()),
        MismatchError,
        "a number of the gradient of 2.bias",
    ),
    "removed": (changed(removed), MismatchError, "there is none"),
    "scaled by the loss": (scaled_by_loss, MismatchError, "a number of the gradient of"),
    "another rate": (other_rate, MismatchError, "learning rates"),
    "in a closure": (in_closure, MismatchError, "the gradient of 0.weight: "),
    "one of two optimizers": (second, MismatchError, "has made 3 steps of the optimizer, "),
    "frozen on one rank": (frozen, GradientError, "0.weight has requires_grad=False on some ranks"),
    "parameters": (clamped, MismatchError, "a number of 2.weight"),
}


def train(world: World, step: Step) -> Any:
    model = mlp()
    model, optimizer, data = mpitrain.torch.prepare(model, sgd(model.parameters()), loader(drop_last=True))
    for number, (x, y) in enumerate(data):
        step(
            model,
            optimizer,
            lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y),  # type: ignore[misc]
            number == 1 and world.rank == world.size - 1,
        )
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(world: World, name: str) -> None:
    skip_alone(world)
    step, kind, text = REFUSED[name]
    found = error_on_all(world, kind, lambda: train(world, step))
    assert text in found, found


def exchanged_by_hand(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    world = mpitrain.init()
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss(), model.parameters()), strict=True):
        parameter.grad = torch.from_numpy(world.mean(gradient.numpy()))
    optimizer.step()


def by_root(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    """One rank looks at gradients, computes without an exchange, and makes a step without gradients."""
    optimizer.zero_grad()
    if odd:
        optimizer.step()
        with torch.no_grad():
            loss()
    usual(model, optimizer, loss, odd, lambda: [p.grad.norm().item() for p in model.parameters()] if odd else None)


def scaler(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(loss() * (float("inf") if odd else 1)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)


def closure(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    in_closure(model, optimizer, loss, odd=False)


def twice_everywhere(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    twice(model, optimizer, loss, odd=True)


def two(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    second(model, optimizer, loss, odd=False)


def accumulated(model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
    optimizer.zero_grad()
    for last in (False, False, True):
        with contextlib.nullcontext() if last else mpitrain.torch.accumulate(model):
            (loss() / 3).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "step", [usual, exchanged_by_hand, by_root, scaler, closure, twice_everywhere, two, accumulated]
)
def test_right_programs_are_not_refused(world: World, step: Step) -> None:
    assert_equal_everywhere(world, train(world, step))


def with_norm() -> tuple[Any, Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
    return mpitrain.torch.prepare(model, sgd(model.parameters()), loader(batch_size=11))


def test_buffers_of_forward_passes_without_a_backward_pass(world: World) -> None:
    """Running means become those of one process."""
    model, _, data = with_norm()
    torch.optim.swa_utils.update_bn(data, model)
    assert_equal_everywhere(world, model)
    found = model[1].running_mean.clone()
    torch.optim.swa_utils.update_bn(data.given, model)
    assert torch.allclose(found, model[1].running_mean, rtol=1e-12)


def test_tells_of_norm_layers_of_other_models(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    skip_alone(world)
    model, _, data = with_norm()
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.optim.swa_utils.update_bn(data.given, average)
    with torch.no_grad():
        for x, _ in data:
            average.eval()(x)
    assert "norm layers" not in capsys.readouterr().out
    torch.optim.swa_utils.update_bn(data, average)
    assert ("1 norm layers (BatchNorm1d) of a model that prepare()" in capsys.readouterr().out) == world.is_root
