"""After a backward pass that all ranks refuse, all are in the same state: they continue, or get the same errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpitrain as mt
import mpitrain.torch
from mpitrain import World
from mpitrain.adapters.torch_arrays import tensor_of
from mpitrain.errors import GradientError, MismatchError, MpitrainError
from tests.ranks.common import error_on_all

from .prepared import assert_equal_everywhere, batches, loader, mlp, tensors

pytestmark = pytest.mark.usefixtures("several")


def with_norm() -> Any:
    layers = torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
    return torch.nn.Sequential(*layers).double()


def sgd(parameters: Any) -> Any:
    """Without momentum, which would stay different where a program makes the parameters equal again."""
    return torch.optim.SGD(parameters, lr=0.1)


def drawn() -> Any:
    """Each rank reads its own samples, so no batch is compared before the backward pass."""
    return loader(drop_last=True)


def whole() -> Any:
    """Whole batches: the ranks compare each one as they take it."""
    return batches()[:-1]


def loss_of(model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_equal(world: World, model: Any) -> None:
    for mine, values in zip(model.state_dict().values(), world.broadcast_object(tensors(model)), strict=True):
        mine.copy_(tensor_of(values))


def is_odd(world: World) -> bool:
    return world.rank == world.size - 1


def prepared(model: Any = None, data: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    model = model or mlp()
    return mpitrain.torch.prepare(model, sgd(model.parameters()), data or drawn(), **options)


class Epochs:
    """A loop in which the last rank may leave out its first step or its second batch."""

    def __init__(self, world: World, parts: tuple[Any, Any, Any], passes: Callable[[Any, Any], None] | None = None):
        self.world, (self.model, self.optimizer, self.data) = world, parts
        self.passes = passes or (lambda model, batch: loss_of(model, batch).backward())

    def run(self, left_out: str = "", caught: Callable[[MismatchError], object] | None = None) -> None:
        for number, batch in enumerate(self.data):
            if left_out == "a batch" and number == 1 and is_odd(self.world):
                continue
            self.optimizer.zero_grad()
            try:
                self.passes(self.model, batch)
            except MismatchError as error:
                if caught is None:
                    raise
                caught(error)
            if left_out != "a step" or number or not is_odd(self.world):
                self.optimizer.step()

    def go_on(self) -> None:
        """Train an epoch from equal parameters, which must not raise anything, and leave equal replicas."""
        make_equal(self.world, self.model)
        before = tensors(self.model)[0].copy()
        self.run()
        assert_equal_everywhere(self.world, self.model)
        assert (before != tensors(self.model)[0]).any()


def accumulated(model: Any, batch: Any) -> None:
    """What this rank alone has accumulated goes too."""
    with mpitrain.torch.accumulate(model):
        loss_of(model, batch).backward()
    loss_of(model, batch).backward()


@pytest.mark.parametrize("passes", [None, accumulated])
@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("make_model", [mlp, with_norm])
def test_a_step_that_one_rank_skips(world: World, make_model: Callable[[], Any], threaded: bool, passes: Any) -> None:
    """The next backward pass is refused. A step after it changes nothing, and the batches after it are exchanged."""
    loop, said = Epochs(world, prepared(make_model(), threaded=threaded), passes), []

    def caught(error: MismatchError) -> None:
        said.append(str(error))
        assert error.known_everywhere
        assert all(one.grad is None for one in loop.model.parameters())
        before = [one.detach().clone() for one in loop.model.parameters()]
        loop.optimizer.step()
        assert all(map(torch.equal, before, loop.model.parameters()))
        make_equal(world, loop.model)

    loop.run("a step", caught)
    assert world.allgather(said) == [said] * world.size
    assert len(said) == 1
    assert "steps of the optimizer" in said[0]
    assert_equal_everywhere(world, loop.model)
    loop.go_on()


@pytest.mark.parametrize("make_model", [mlp, with_norm])
def test_replicas_that_are_left_different(world: World, make_model: Callable[[], Any]) -> None:
    """Every later error is that parameters differ, on all ranks."""
    said: list[str] = []
    loop = Epochs(world, prepared(make_model()))
    run = lambda: loop.run("a step", lambda error: said.append(str(error)))  # noqa: E731
    said.append(error_on_all(world, MismatchError, run))
    assert world.allgather(said) == [said] * world.size
    assert "has made 0 steps of the optimizer" in said[0]
    assert said[1:], said
    for text in said[1:]:
        assert " of the optimizer: a number of " in text, said


@pytest.mark.parametrize("make_model", [mlp, with_norm])
@pytest.mark.parametrize("make_data", [drawn, whole])
def test_a_batch_that_one_rank_skips(world: World, make_model: Callable[[], Any], make_data: Callable[[], Any]) -> None:
    """The ranks end the epoch, and the next one goes as if nothing had been."""
    loop = Epochs(world, prepared(make_model(), make_data()))

    def caught(error: MismatchError) -> None:
        loop.optimizer.step()
        raise error

    text = error_on_all(world, MismatchError, lambda: loop.run("a batch", caught))
    if make_data is drawn:  # nothing is reported before a batch is taken; the next backward pass finds the error
        assert "exchanges the gradients of batch 3; " in text
        assert "those of batch 2; did a rank leave out a backward pass?" in text
    else:  # the others wait in the second batch's step
        said = f"{world.name(world.size - 1)}: take the next batch; {world.name(0)}: step; do all ranks make"
        assert make_model is with_norm or said in text
    assert_equal_everywhere(world, loop.model) if make_model is mlp else None
    loop.go_on()


def test_virtual_ranks_and_rounds(world: World) -> None:
    """In rounds, a step after the refusal is refused on all ranks: a round counts its steps."""
    number = 2 * world.size
    x = torch.randn(6 * number, 5, generator=torch.Generator().manual_seed(1)).double()
    given = [(part, torch.zeros(2 * number, dtype=torch.int64)) for part in x.split(2 * number)]

    def passes(model: Any, batch: Any) -> None:
        for part in mpitrain.torch.virtual_batches(model, batch):
            loss_of(model, part).backward()

    loop = Epochs(world, prepared(with_norm(), given, strategy=mt.Sync(virtual_ranks=number)), passes)
    assert "steps of the optimizer" in error_on_all(world, MismatchError, lambda: loop.run("a step"))
    loop.go_on()
    loop = Epochs(world, prepared(strategy=mt.LocalSGD(sync_every=2)))
    error_on_all(world, MismatchError, lambda: loop.run("a batch"))
    with pytest.raises(GradientError, match=r"came without a backward\(\) since the last step"):
        loop.optimizer.step()
    loop.run()
    mpitrain.torch.end_round(loop.model)
    assert_equal_everywhere(world, loop.model)


def test_batches_that_stay_apart(world: World) -> None:
    """Each later backward pass says so on all ranks."""
    model, optimizer, data = prepared()
    taken = iter(data)
    if is_odd(world):
        next(taken)
    for number in (1, 2):
        batch = next(taken)
        text = error_on_all(world, MismatchError, loss_of(model, batch).backward)
        assert f"exchanges the gradients of batch {number + 1}; {world.name(0)}: those of batch {number}" in text
        optimizer.step()
    assert_equal_everywhere(world, model)


def test_a_parameter_that_is_thawed_for_a_while(world: World) -> None:
    """No step uses its gradient, which is this rank's own."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, optimizer, data = prepared(model)
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        model[0].weight.requires_grad_(number == 1)
        with contextlib.nullcontext() if number != 1 else pytest.raises(GradientError, match="had requires_grad=False"):
            loss_of(model, batch).backward()
        optimizer.step()
        assert_equal_everywhere(world, model)
    world.barrier()


def test_an_error_of_one_rank_in_the_middle(world: World) -> None:
    """Others have begun to send, so nobody can continue. All are told, also at the next backward pass."""
    model = mlp()
    failing = is_odd(world)

    def fail(gradient: Any) -> None:
        if failing:
            raise ZeroDivisionError("in a hook")

    model[0].weight.register_hook(fail)
    model, optimizer, data = prepared(model, whole())

    def run() -> None:
        for batch in data:
            try:
                loss_of(model, batch).backward()
            except ZeroDivisionError:
                continue
            optimizer.step()

    text = error_on_all(world, MismatchError, run)
    assert "take the next batch" in text
    assert "end of a step" in text
    failing = False
    batch = next(iter(data))
    with pytest.raises(MpitrainError, match="start again from a checkpoint"):
        loss_of(model, batch).backward()
    with pytest.raises(GradientError, match=r"a backward\(\) that an error ended in the middle of its exchange"):
        optimizer.step()
