"""Mixed precision: 16 bits in the model, float32 everywhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Checkpoint, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim import SGD, Adam, LossScale

from .common import assert_same_bits
from .precisions import FLOAT32, GRADIENTS, NARROW, Given, trainer_of
from .trainings import Record, bits


def mean_of(world: World) -> numpy.ndarray:
    """The weighted mean gradient of w, in float64."""
    weights = numpy.arange(1, world.size + 1)
    return GRADIENTS + float((weights * numpy.arange(world.size) / 4).sum() / weights.sum())


# -- what is kept in float32 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parameters_move_by_less_than_16_bits_can_tell(world: World, precision: str) -> None:
    """1 - 2^-14 is 1 in both formats. float64 gives the expected value. Each step may round once, to 2^-25."""
    rate, steps = 2.0**-14, 100
    function = Given(world.rank, NARROW[precision])
    scale = LossScale(2.0**10) if precision == "fp16" else None
    trainer = trainer_of(world, function, precision, SGD(rate), loss_scale=scale)
    for _ in range(steps):
        trainer.step()
    found = trainer.adapter.parameters()
    assert found["w"].dtype == FLOAT32
    expected = 1 - rate * steps * mean_of(world)
    numpy.testing.assert_allclose(found["w"], expected, rtol=0, atol=steps * 2.0**-24)
    assert abs(expected - 1).max() > 500 * steps * 2.0**-24  # far from the first value
    numpy.testing.assert_allclose(found["b"], -rate * steps, rtol=steps * 2.0**-24)
    # The model saw the rounded parameters of the step before.
    numpy.testing.assert_array_equal(function.seen[0], numpy.ones(3))
    last = (1 - rate * (steps - 1) * mean_of(world)).astype(NARROW[precision])
    numpy.testing.assert_allclose(
        function.seen[-1].astype(float), last.astype(float), rtol=float(ml_dtypes.finfo(NARROW[precision]).eps)
    )
    assert_same_bits(world, *found.values())


def test_gradients_are_added_up_in_float32(world: World) -> None:
    """fp16 has 2048 and 1, but not 2049."""

    def function(parameters: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        on_gradient("w", numpy.full(3, 2048 if world.rank == 0 else 1, numpy.float16))
        on_gradient("b", numpy.zeros((2, 2), numpy.float16))
        return 0.0

    trainer = trainer_of(world, function, "fp16", SGD(1.0), loss_scale=LossScale(1), weight=1)
    trainer.step()
    expected = numpy.float32(1 - (2048 + world.size - 1) / world.size)
    numpy.testing.assert_allclose(trainer.adapter.parameters()["w"], expected, rtol=2.0**-23)


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**13], ids=str)
def test_the_scale_changes_no_bit(world: World, scale: float) -> None:
    """The scale is a power of two, and float32 divides by it exactly: finite gradients in fp16 are as without it."""
    found = []
    for initial in (1.0, scale):
        trainer = trainer_of(world, Given(world.rank, NARROW["fp16"]), "fp16", Adam(0.1), loss_scale=LossScale(initial))
        for _ in range(5):
            trainer.step()
        found.append(bits(trainer))
        for name in ("value", "good_steps", "skipped_steps"):
            del found[-1][f"adapter/loss_scale/{name}"]
    assert found[0] == found[1]


def test_who_writes_into_the_parameters_is_seen_by_the_next_step(world: World) -> None:
    function = Given(world.rank, NARROW["bf16"])
    trainer = trainer_of(world, function, "bf16", SGD(0.0))
    trainer.step()
    trainer.adapter.parameters()["w"][:] = 3
    trainer.step()
    trainer.adapter.load_parameters({"w": numpy.full(3, 5, FLOAT32), "b": numpy.zeros((2, 2), FLOAT32)})
    trainer.step()
    assert [its.tolist() for its in function.seen] == [[1.0] * 3, [3.0] * 3, [5.0] * 3]


# -- a model that learns ---------------------------------------------------------------------------------------------


def mlp_builder(precision: str, scale: LossScale | None = None, rate: float = 0.1) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        rng = numpy.random.default_rng(5)
        x = rng.standard_normal((96, 12)).astype(numpy.float32)
        y = (x @ rng.standard_normal((12, 4))).argmax(axis=1)
        parameters = mlp.initial(rng, numpy, inputs=12, hidden=(16,), classes=4)
        adapter = ArrayFunction(
            mlp.loss_and_gradients, parameters, SGD(rate, momentum=0.9), precision=precision, loss_scale=scale
        )
        # In the order of this seed, no ReLU flips. A flip would part two runs by more than the roundings.
        return Parts(adapter, Sync(), ArrayData(world, (x, y), global_batch=32, seed=1))

    return build


def losses(world: World, precision: str, scale: LossScale | None = None) -> list[float]:
    record = Record()
    Trainer(mlp_builder(precision, scale), [StopAtStep(60), record]).run()
    assert len(set(world.allgather(repr([step.loss for step in record.steps])))) == 1
    return [step.loss for step in record.steps]


def test_a_model_learns_as_it_does_in_float32(world: World) -> None:
    """The loss of a step is off by the roundings in the step and in the steps before.

    One rounding to bf16 is 2^-9 of a value, and to fp16 2^-12. A logit is of order 1 to 10, and comes from about
    three roundings of order 1. A loss of about 0.1 to 2 may therefore be off by some 2^-9 x 10 on either side, and
    this is the bound. The loss must be off, or the computation was not in 16 bits.
    """
    exact = losses(world, "float32")
    assert exact[-1] < exact[0] / 5
    for precision, unit in (("bf16", 2.0**-9), ("fp16", 2.0**-12)):
        found = losses(world, precision, LossScale(2.0**10) if precision == "fp16" else None)  # no step is skipped
        distance = max(abs(a - b) for a, b in zip(found, exact, strict=True))
        assert unit / 16 < distance < 10 * unit, (precision, distance / unit)


def test_a_run_that_is_resumed_has_the_same_bits(world: World, shared: Path) -> None:
    """The scale is too large at first and grows every 4 steps, so steps are skipped during the whole run."""
    builder = lambda: mlp_builder("fp16", LossScale(2.0**24, growth_interval=4))  # noqa: E731
    whole = Trainer(builder(), [StopAtStep(30)])
    whole.run()
    skipped = whole.adapter.loss_scale.skipped_steps
    assert skipped > 8
    Trainer(builder(), [StopAtStep(17), Checkpoint(shared, steps=100)]).run()
    resumed = Trainer(builder(), [StopAtStep(30), Checkpoint(shared, steps=100)])
    resumed.run()
    assert resumed.adapter.loss_scale.skipped_steps == skipped
    assert bits(resumed) == bits(whole)


def test_a_checkpoint_of_another_precision(world: World) -> None:
    """The parameters are the same in all precisions. A scale is left out, or stays as it is."""
    of = {name: Trainer(mlp_builder(name)) for name in ("float32", "bf16")}
    of["fp16"] = Trainer(mlp_builder("fp16", LossScale(2.0**10)))
    of["fp16"].step()
    for name in ("float32", "bf16"):
        of[name].restore(of["fp16"].state())
        assert_same_bits(world, *of[name].adapter.parameters().values(), *of["fp16"].adapter.parameters().values())
        of[name].step()
    of["fp16"].restore(of["bf16"].state())
    assert of["fp16"].adapter.loss_scale.value == 2.0**10
    of["fp16"].step()


def test_a_damaged_scale_in_a_checkpoint_changes_nothing(world: World) -> None:
    trainer = Trainer(mlp_builder("fp16"))
    state = trainer.state()
    state = {**state, "step": 3, "adapter": {**state["adapter"], "loss_scale": {"value": 3.0}}}
    state["adapter"]["parameters"] = {name: its + 1 for name, its in state["adapter"]["parameters"].items()}
    before = bits(trainer)
    with pytest.raises(CheckpointError, match=r"the loss scale's state is \{'value': 3.0\}"):
        trainer.restore(state)
    assert bits(trainer) == before


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype", "text"),
    [
        ("fp8", "float32", "there is no precision 'fp8'; known: float32, bf16, fp16"),
        ("bf16", "float64", "precision=bf16: w is float64; parameters are kept in float32"),
        ("float32", "float64", "precision=float32: w is float64; parameters are kept in float32"),
    ],
)
def test_a_precision_that_cannot_be(world: World, precision: str, dtype: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        ArrayFunction(lambda *_: 0.0, {"w": numpy.zeros(3, dtype)}, SGD(0.1), precision=precision)
