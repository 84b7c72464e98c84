"""prepare() and DistributedOptimizer refuse, on all ranks, what would make replicas differ; and nothing else."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpitrain.horovod.torch as hvd
import mpitrain.torch
from mpitrain import World
from mpitrain.errors import GradientError, MismatchError
from mpitrain.reducer.checks import check_final
from mpitrain.reducer.unexchanged import tell_of_buffers
from tests.ranks.common import error_on_all, skip_alone

from .prepared import assert_equal_everywhere, loader, mlp, sgd

pytestmark = pytest.mark.usefixtures("horovod")


class Batch:
    """One batch of a loop in which the last rank deviates where `odd` is set."""

    def __init__(self, kind: str, model: Any, optimizer: Any, loss: Callable[[], Any], odd: bool) -> None:
        self.is_horovod, self.model, self.optimizer, self.loss, self.odd = (
            kind == "horovod",
            model,
            optimizer,
            loss,
            odd,
        )

    def backward(self) -> Any:
        """Up to the gradients of all ranks."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if self.is_horovod:
            self.optimizer.synchronize()
        return loss

    def step(self, closure: Any = None) -> None:
        with self.optimizer.skip_synchronize() if self.is_horovod else contextlib.nullcontext():
            self.optimizer.step(closure)


Step = Callable[[Batch], None]


def usual(batch: Batch, then: Callable[[], object] = lambda: None) -> None:
    batch.backward()
    then()
    batch.step()


def changed(change: Callable[[Any], object]) -> Step:
    """On one rank, something is done between the exchange and the step."""
    return lambda batch: usual(batch, (lambda: change(batch.model[2].bias)) if batch.odd else (lambda: None))


def skipped(batch: Batch) -> None:
    batch.backward()
    if not batch.odd:
        batch.step()


def twice(batch: Batch) -> None:
    usual(batch)
    if batch.odd:
        batch.step()


def own_gradients(batch: Batch) -> None:
    """By prepare() without a backward pass; DistributedOptimizer asks for one."""
    if batch.is_horovod:
        batch.backward()
    for parameter, gradient in zip(batch.model.parameters(), gradients_of(batch), strict=True):
        parameter.grad = gradient
    batch.step()


def gradients_of(batch: Batch) -> Any:
    return torch.autograd.grad(batch.loss(), batch.model.parameters())


def own_update(batch: Batch) -> None:
    gradients = gradients_of(batch)
    with torch.no_grad():
        for parameter, gradient in zip(batch.model.parameters(), gradients, strict=True):
            parameter.sub_(gradient)


def scaled_by_loss(batch: Batch) -> None:
    usual(batch, lambda: [one.grad.mul_(batch.loss().item()) for one in batch.model.parameters()])


def other_rate(batch: Batch) -> None:
    batch.optimizer.param_groups[0]["lr"] *= 0.5 if batch.odd else 1
    usual(batch)


def in_closure(batch: Batch) -> None:
    def closure() -> Any:
        value = batch.backward()
        if batch.odd:
            batch.model[0].weight.grad.zero_()
        return value

    batch.step(closure)


def second(batch: Batch) -> None:
    usual(batch)
    if not batch.odd:
        torch.optim.Adam(batch.model[2].parameters()).step()


def frozen(batch: Batch) -> None:
    batch.model[0].weight.requires_grad_(not batch.odd)
    usual(batch)


def clamped(batch: Batch) -> None:
    usual(batch)
    if batch.odd:
        with torch.no_grad():
            batch.model[2].weight.fill_(3.0)


def one_number(batch: Batch) -> None:
    """Of 4,000, after the step: a sample may leave it out."""
    usual(batch)
    if batch.odd:
        with torch.no_grad():
            batch.model[0].weight[417, 3] += 0.5


# By both, by prepare(), and by Horovod's interface.
REFUSED: dict[str, tuple[Step, str]] = {
    "a skipped step": (skipped, "has made 1 steps of the optimizer, "),
    "autograd.grad": (own_gradients, "a number of the gradient of"),
    "zeroed": (changed(lambda p: p.grad.zero_()), "the gradient of 2.bias: "),
    "zeroed through data": (changed(lambda p: p.grad.data.zero_()), "a number of the gradient of 2.bias"),
    "removed": (changed(lambda p: setattr(p, "grad", None)), "there is none"),
    "another rate": (other_rate, "learning rates"),
    "in a closure": (in_closure, "the gradient of 0.weight: "),
}
BY_PREPARE: dict[str, tuple[Step, str]] = {
    "a step twice": (twice, "step of the optimizer without a backward() since"),
    "an update by hand": (own_update, "after 0 steps of the optimizer: a number of 0.weight"),
    "scaled by the loss": (scaled_by_loss, "a number of the gradient of"),
    "one of two optimizers": (second, "has made 3 steps of the optimizer, "),
    "frozen on one rank": (frozen, "0.weight has requires_grad=False on some ranks"),
    "parameters": (clamped, "a number of 2.weight"),
    "one parameter": (one_number, "after 4 steps of the optimizer: a number of 0.weight"),
}
BY_HOROVOD: dict[str, tuple[Step, str]] = {
    "a step twice": (twice, "steps of the optimizer, "),
    "replaced": (changed(lambda p: setattr(p, "grad", 2 * p.grad)), "the gradient of 2.bias: "),
}
KINDS = {"prepare": REFUSED | BY_PREPARE, "horovod": REFUSED | BY_HOROVOD}
CASES = [(kind, name) for kind, refused in KINDS.items() for name in refused]


def wide() -> Any:
    layers = torch.nn.Linear(5, 800), torch.nn.Tanh(), torch.nn.Linear(800, 3)
    return torch.nn.Sequential(*layers).double()


def horovods() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    return model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())


def train(world: World, kind: str, step: Step, parts: Any = None, steps: int = 4) -> Any:
    """Batches of each rank's own, of which the last rank deviates in the second one."""
    if kind == "horovod":
        model, optimizer = parts or horovods()
        made = torch.Generator().manual_seed(world.rank)
        data: Any = [torch.randn(4, 5, dtype=torch.float64, generator=made) for _ in range(steps)]
        loss_of = lambda x: model(x).square().mean()  # noqa: E731
    else:
        model = wide() if step is one_number else mlp()
        model, optimizer, data = mpitrain.torch.prepare(model, sgd(model.parameters()), loader(drop_last=True))
        loss_of = lambda batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    for number, given in enumerate(data):
        odd = number == 1 and world.rank == world.size - 1
        step(Batch(kind, model, optimizer, lambda given=given: loss_of(given), odd))  # type: ignore[misc]
    return model


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_refused_on_all_ranks(world: World, kind: str, name: str) -> None:
    skip_alone(world)
    step, text = KINDS[kind][name]
    error = GradientError if step is frozen else MismatchError
    found = error_on_all(world, error, lambda: train(world, kind, step))
    assert text in found, found
    if step is frozen:
        assert f"on some ranks (rank {world.size - 1} on " in found, found


# -- what is right ---------------------------------------------------------------------------------------------------


def exchanged_by_hand(batch: Batch) -> None:
    world = mpitrain.init()
    for parameter, gradient in zip(batch.model.parameters(), gradients_of(batch), strict=True):
        parameter.grad = torch.from_numpy(world.mean(gradient.numpy()))
    batch.step()


def clipped(batch: Batch) -> None:
    usual(batch, lambda: torch.nn.utils.clip_grad_norm_(batch.model.parameters(), 0.01))


def looked_at(batch: Batch) -> None:
    """One rank looks at gradients, computes without an exchange, and makes a step without gradients."""
    if batch.odd:
        batch.optimizer.zero_grad()
        batch.step()
        with torch.no_grad():
            batch.loss()
    usual(batch, lambda: [p.grad.norm().item() for p in batch.model.parameters()] if batch.odd else None)


def scaler(batch: Batch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = batch.loss
    batch.loss = lambda: scaler.scale(loss() * (float("inf") if batch.odd else 1))
    batch.backward()
    scaler.unscale_(batch.optimizer)
    torch.nn.utils.clip_grad_norm_(batch.model.parameters(), 0.1)
    with batch.optimizer.skip_synchronize() if batch.is_horovod else contextlib.nullcontext():
        scaler.step(batch.optimizer)


def everywhere(step: Step, odd: bool) -> Step:
    def same(batch: Batch) -> None:
        batch.odd = odd
        step(batch)

    return same


def accumulated(batch: Batch) -> None:
    batch.optimizer.zero_grad()
    for last in (False, False, True):
        with contextlib.nullcontext() if last else mpitrain.torch.accumulate(batch.model):
            (batch.loss() / 3).backward()
    batch.step()


RIGHT = {
    "usual": usual,
    "clipped": clipped,
    "looked at": looked_at,
    "scaler": scaler,
    "twice": everywhere(twice, True),
    "closure": everywhere(in_closure, False),
}
RIGHT_BY_PREPARE = {"by hand": exchanged_by_hand, "two": everywhere(second, False), "accumulated": accumulated}


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param(kind, step, id=f"{kind}-{name}")
        for kind, more in (("prepare", RIGHT_BY_PREPARE), ("horovod", {}))
        for name, step in (RIGHT | more).items()
    ],
)
def test_right_programs_are_not_refused(world: World, kind: str, step: Step) -> None:
    assert_equal_everywhere(world, train(world, kind, step))


# -- of DistributedOptimizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a skipped step", "zeroed", "replaced"])
def test_a_difference_that_is_caught_is_said_once(world: World, name: str) -> None:
    """The program continues, with a step by the gradients of the exchange that has told it."""
    skip_alone(world)
    model, optimizer = horovods()
    caught = []
    for number in range(5):
        x = torch.randn(4, 5, dtype=torch.float64)
        batch = Batch("horovod", model, optimizer, lambda x=x: model(x).square().mean(), world.rank == world.size - 1)  # type: ignore[misc]
        if number == 1:
            KINDS["horovod"][name][0](batch)
            continue
        optimizer.zero_grad(set_to_none=False)  # the tensors that a rank has changed once more stay
        batch.loss().backward()
        try:
            optimizer.synchronize()
        except MismatchError:
            caught.append(number)
        batch.step()
    assert caught == [2]
    final = world.control.notes.final
    ends = world.allgather({number: values for number, values in final.items() if number > 0})  # of models
    check_final(world, dict(enumerate(ends)))
    assert ends[0]  # they have compared the steps that came later


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_without_synchronize(world: World, is_first: bool) -> None:
    """It would use this rank's own gradients."""
    skip_alone(world)
    model, optimizer = horovods()
    if not is_first:
        train(world, "horovod", usual, (model, optimizer), 1)
    optimizer.zero_grad()
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    said = r"call optimizer.synchronize\(\) after backward"
    with pytest.raises(AssertionError, match=said), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.synchronize()


def test_uneven_steps_end_with_join_and_a_state_that_one_rank_loads(world: World) -> None:
    """Also with a learning rate that changes with each step, and in a second epoch without a broadcast."""
    model, optimizer = horovods()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        for _ in range(2 + world.rank):
            usual(Batch("horovod", model, optimizer, lambda: model(torch.ones(2, 5, dtype=torch.float64)).sum(), False))
            schedule.step()
        hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_equal_everywhere(world, model)
    parts = horovods()
    train(world, "horovod", usual, parts, 2)
    if world.is_root:
        parts[1].load_state_dict(parts[1].state_dict())
    assert_equal_everywhere(world, train(world, "horovod", usual, parts, 2))


def with_norm() -> tuple[Any, Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
    return mpitrain.torch.prepare(model, sgd(model.parameters()), loader(batch_size=11))


def test_norm_layers_in_forward_passes_without_a_backward_pass(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Running means become those of one process. Of norm layers of another model, a line tells."""
    model, _, data = with_norm()
    torch.optim.swa_utils.update_bn(data, model)
    assert_equal_everywhere(world, model)
    for x, y in data:  # a pass after the last backward pass
        torch.nn.functional.cross_entropy(model(x), y).backward()
        model(x)
    assert_equal_everywhere(world, model)
    torch.optim.swa_utils.update_bn(data, model)
    found = model[1].running_mean.clone()
    torch.optim.swa_utils.update_bn(data.given, model)
    assert torch.allclose(found, model[1].running_mean, rtol=1e-12)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.optim.swa_utils.update_bn(data.given, average)
    with torch.no_grad():
        for x, _ in data:
            average.eval()(x)
    assert "norm layers" not in capsys.readouterr().out
    torch.optim.swa_utils.update_bn(data, average)
    told = "1 norm layers (BatchNorm1d) of a model that prepare()" in capsys.readouterr().out
    assert told == (world.is_root and world.size > 1)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_forward_pass_at_the_end_of_the_program(
    world: World, capsys: pytest.CaptureFixture[str], breaks: bool
) -> None:
    """Nothing is exchanged any more, so a line tells of buffers that differ; not of those that one rank has loaded."""
    model, _, data = with_norm()
    for x, y in data:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if breaks:
            break

    def told() -> str:
        tell_of_buffers(world, dict(enumerate(world.allgather(world.control.notes._last_values()))))
        return capsys.readouterr().out

    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.eval()(x)
        if world.is_root:
            model.train()(2 * x)
    assert not told()
    model.load_state_dict(kept)
    model.train()(x[: 2 + world.rank])
    assert ("differ between ranks at the end. Forward passes" in told()) == (world.is_root and world.size > 1)
