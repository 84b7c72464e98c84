"""NaN and infinity: which rank, which tensor, which step, and where they came from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy
import pytest

from mpitrain import ArrayFunction, Parts, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import NonFiniteError
from mpitrain.optim import SGD, LossScale
from mpitrain.training.non_finite import _first, located

from .common import error_on_all

FINITE = "also checked: the losses, the batches and the parameters of all ranks are finite"


def regression(parameters: dict, batch: tuple, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0


def trainer_of(function: Callable[..., float], spoil: Callable[[numpy.ndarray], None] = lambda x: None) -> Trainer:
    """20 samples in order, 10 in a step."""

    def build(world: World) -> Parts:
        x = numpy.random.default_rng(0).standard_normal((20, 4))
        spoil(x)
        adapter = ArrayFunction(function, {"w": numpy.zeros(4)}, SGD(0.01))
        return Parts(adapter, Sync(), ArrayData(world, (x, numpy.ones(20)), global_batch=10, shuffle=False))

    return Trainer(build)


def owner_of(world: World, sample: int) -> tuple[int, int, int]:
    """The rank that has this sample of a batch of 10, its number there, and how many are there."""
    sizes = [10 // world.size + (rank < 10 % world.size) for rank in range(world.size)]
    rank = 0
    while sample >= sizes[rank]:
        sample, rank = sample - sizes[rank], rank + 1
    return rank, sample, sizes[rank]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sample", [10, 14, 19])
def test_bad_data_are_named_by_rank_sample_and_step(world: World, sample: int, value: float) -> None:
    def spoil(x: numpy.ndarray) -> None:
        x[sample, 2] = value

    trainer = trainer_of(regression, spoil)
    assert trainer.step().number == 1
    with numpy.errstate(invalid="ignore"):
        text = error_on_all(world, NonFiniteError, trainer.step)
    rank, place, count = owner_of(world, sample - 10)
    assert text.startswith(f"{world.name(rank)}: the gradient of w holds NaN or infinity; nothing was changed")
    found = f"the batch holds {value} in [0], sample {place} of {count}"
    assert text.endswith(f". Step 2; also checked: {world.name(rank)}: the loss is {value}, {found}")
    assert trainer.step_number == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_loss_that_is_no_number_while_the_gradients_are(world: World, value: float) -> None:
    odd = world.size - 1

    def function(*arguments: Any) -> float:
        loss = regression(*arguments)
        return value if world.rank == odd else loss

    trainer = trainer_of(function)
    before = trainer.adapter.parameters()["w"].copy()
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert text.startswith(f"{world.name(odd)}: the loss is NaN or infinity; nothing was changed by this step. ")
    assert text.endswith(f"Step 1; also checked: {world.name(odd)}: the loss is {value}")
    assert trainer.adapter.parameters()["w"].tobytes() == before.tobytes()


def test_a_gradient_alone(world: World) -> None:
    odd = world.size // 2

    def function(parameters: Any, batch: Any, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        poison = math.nan if world.rank == odd else 0.0
        return regression(parameters, batch, lambda name, gradient: on_gradient(name, gradient + poison))

    text = error_on_all(world, NonFiniteError, trainer_of(function).step)
    assert text.startswith(f"{world.name(odd)}: the gradient of w holds NaN")
    assert text.endswith(f"Step 1; {FINITE}")


def test_parameters_that_are_no_numbers_any_more(world: World) -> None:
    trainer = trainer_of(regression)
    trainer.adapter.parameters()["w"][3] = math.inf
    with numpy.errstate(invalid="ignore"):
        text = error_on_all(world, NonFiniteError, trainer.step)
    who = "on all ranks" if world.size > 1 else world.name()
    assert text.endswith(f"also checked: {who}: the loss is inf, the parameter w holds inf")


def test_losses_that_do_not_count(world: World) -> None:
    """NaN on ranks without samples, as the mean of nothing; and a loss in fp16 beyond its range: its scale decides."""
    count = world.size + 1

    def without(parameters: Any, batch: Any, on_gradient: Any) -> float:
        loss = regression(parameters, batch, on_gradient)
        return loss if len(batch[0]) else math.nan

    def infinite(*arguments: Any, loss_scale: float) -> float:
        regression(*arguments)
        return math.inf

    for function, scale in ((without, None), (infinite, LossScale())):

        def build(world: World, function: Any = function, scale: LossScale | None = scale) -> Parts:
            data = ArrayData(world, (numpy.ones((count, 4)), numpy.ones(count)), global_batch=world.size)
            return Parts(ArrayFunction(function, {"w": numpy.zeros(4)}, SGD(0.01), loss_scale=scale), Sync(), data)

        trainer = Trainer(build)
        steps = [trainer.step() for _ in range(2)]
        assert [(step.samples, step.skipped) for step in steps] == [(world.size, False), (1, False)]
        assert all(math.isinf(step.loss) == (scale is not None) for step in steps)


def test_the_first_place() -> None:
    assert _first(numpy.array([[0.0, 1.0], [math.nan, math.inf]])) == (1, 0)
    assert _first(numpy.array([1.0, -math.inf], ml_dtypes.bfloat16)) == (1,)
    assert _first(numpy.zeros((3, 0))) is None
    assert _first(numpy.array(math.nan)) == ()
    assert _first(numpy.arange(3)) is None
    assert _first(numpy.array(["a", "b"])) is None


def test_a_batch_that_is_no_tree(world: World) -> None:
    error = located(world, NonFiniteError("x"), step=7, batch="text", loss=0.5, parameters={})
    who = "on all ranks" if world.size > 1 else world.name()
    assert str(error) == f"x. Step 7; also checked: {who}: the batch is not a tree of arrays and was not checked"
