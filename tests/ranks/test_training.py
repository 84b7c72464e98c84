"""Training on any number of ranks is training on one: parameters, losses, metrics, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.compression import CODECS
from mpitrain.config import read_config
from mpitrain.data import ArrayData
from mpitrain.errors import GradientError, MismatchError, MissingGradientError, NonFiniteError
from mpitrain.optim import SGD

from .common import assert_same_bits, error_on_all, skip_alone
from .placements import placed
from .trainings import (
    CLASSES,
    HIDDEN,
    INPUTS,
    MOMENTUM,
    RATE,
    Record,
    bare_numpy,
    builder,
    initial_parameters,
    samples_of,
)

# -- the same as one process ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "global_batch"), [(71, 23), (24, 8), (70, 1000)], ids=str)
def test_training_equals_one_process(world: World, count: int, global_batch: int) -> None:
    """Batches that no number of ranks divides; last ones of 2 samples; one batch of everything."""
    record = Record()
    trainer = Trainer(builder(count, global_batch), [StopAtStep(10), record])
    trainer.run()
    parameters, losses, sizes = bare_numpy(count, global_batch, 10)
    assert [step.number for step in record.steps] == list(range(1, 11))
    assert [step.samples for step in record.steps] == sizes
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-12)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, parameters[name], rtol=1e-12, atol=1e-14)
    assert {step.learning_rate for step in record.steps} == {RATE}
    assert len(set(world.allgather(repr([step.loss for step in record.steps])))) == 1
    assert_same_bits(world, *trainer.adapter.parameters().values())
    assert min(losses) < losses[0]  # it learns, or equal losses would mean little


def test_ranks_that_start_from_different_parameters_get_those_of_rank_0(world: World) -> None:
    def build(world: World) -> Parts:
        parts = builder(20, 10)(world)
        parts.adapter.load_parameters({name: value + world.rank for name, value in parts.adapter.parameters().items()})
        return parts

    trainer = Trainer(build)
    for name, value in initial_parameters().items():
        assert trainer.adapter.parameters()[name].tobytes() == value.tobytes()


# -- compression ------------------------------------------------------------------------------------------------


def losses_with(world: World, monkeypatch: pytest.MonkeyPatch, compression: str) -> list[float]:
    """The losses of a Trainer with this MPITRAIN_COMPRESSION, in a world with one rank per node."""
    own = placed(world, "alone on each node").replaced(config=read_config({"MPITRAIN_COMPRESSION": compression}, {}))
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    samples = [part.astype("float32") if part.dtype.kind == "f" else part for part in samples_of(300)]

    def build(world: World) -> Parts:
        rng = numpy.random.default_rng(1)
        parameters = mlp.initial(rng, numpy, inputs=INPUTS, hidden=(40,), classes=CLASSES)
        adapter = ArrayFunction(mlp.loss_and_gradients, parameters, SGD(RATE, momentum=MOMENTUM))
        return Parts(adapter, Sync(), ArrayData(world, tuple(samples), global_batch=50))

    record = Record()
    trainer = Trainer(build, [StopAtStep(25), record])
    trainer.run()
    assert_same_bits(world, *trainer.adapter.parameters().values())
    return [step.loss for step in record.steps]


@pytest.mark.parametrize("compression", sorted(CODECS))
def test_training_with_the_setting_for_compression(
    world: World, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    skip_alone(world)
    full, short = (losses_with(world, monkeypatch, name) for name in ("none", compression))
    assert short[0] == full[0]
    assert short != full  # it has taken part
    assert full[-1] < 0.95 * full[0]
    if CODECS[compression](False).relative_error < 0.1:
        # A rounding of one in a hundred of the gradients must not show in the loss of a short training.
        numpy.testing.assert_allclose(short, full, rtol=0.01)
    # What top_k and sign leave out arrives up to a hundred steps later: tests/ranks/test_gathered.py has what is exact.


# -- steps that fail --------------------------------------------------------------------------------------------


def spoiled(world: World, at_step: int, odd: int, what: str) -> Any:
    """The model, but on rank `odd` in one step a gradient is not as it should be."""
    step = 0

    def function(parameters: Any, batch: Any, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        nonlocal step
        step += 1

        def pass_on(name: str, gradient: numpy.ndarray) -> None:
            if name == "dense1.bias" and world.rank == odd and step == at_step:
                if what == "missing":
                    return
                gradient = numpy.full_like(gradient, numpy.nan)
            on_gradient(name, gradient)

        return mlp.loss_and_gradients(parameters, batch, pass_on)

    return function


@pytest.mark.parametrize(("what", "kind"), [("nan", NonFiniteError), ("missing", MissingGradientError)])
def test_a_bad_step_changes_nothing_and_the_next_one_may_follow(
    world: World, what: str, kind: type[GradientError]
) -> None:
    odd = world.size - 1
    trainer = Trainer(builder(70, 14, function=spoiled(world, 3, odd, what)))
    for _ in range(2):
        trainer.step()
    before = {name: value.tobytes() for name, value in trainer.adapter.parameters().items()}
    text = error_on_all(world, kind, trainer.step)
    assert text.startswith(world.name(odd))
    assert "dense1.bias" in text
    assert {name: value.tobytes() for name, value in trainer.adapter.parameters().items()} == before
    assert trainer.step_number == 2
    assert math.isfinite(trainer.step().loss)
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_a_gradient_of_no_parameter(world: World) -> None:
    def function(parameters: Any, batch: Any, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        on_gradient("dense3.bias", numpy.zeros(3))
        return 0.0

    trainer = Trainer(builder(20, 10, function=function))
    with pytest.raises(GradientError, match=r"'dense3.bias'; the parameters are dense1.weight, dense1.bias, dense2"):
        trainer.step()


def test_models_that_differ_between_ranks(world: World) -> None:
    skip_alone(world)
    hidden = 4 if world.rank == world.size - 1 else HIDDEN
    text = error_on_all(world, MismatchError, lambda: Trainer(builder(20, 10, hidden=hidden)))
    assert text.startswith(
        f"{world.name(world.size - 1)}: parameter dense1.weight float64 (6, 4); "
        f"{world.name(0)}: parameter dense1.weight float64 (6, 5); "
    )
