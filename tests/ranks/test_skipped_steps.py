"""Ranks skip a step whose gradients the loss scale makes infinite: all of them, or none."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, GradientReducer, Log, Parameter, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.errors import MismatchError, MissingGradientError, NonFiniteError
from mpitrain.optim import SGD, Adam, LossScale

from .common import assert_same_bits, error_on_all, skip_alone
from .precisions import FLOAT32, GRADIENTS, NARROW, Given, Samples, trainer_of
from .trainings import bits


@pytest.mark.parametrize("odd", [0, -1], ids=["rank 0", "last rank"])
@pytest.mark.parametrize("bad", [numpy.inf, -numpy.inf, numpy.nan], ids=str)
def test_a_step_that_is_infinite_on_one_rank_is_skipped_on_all(world: World, odd: int, bad: float) -> None:
    mine = world.rank == odd % world.size
    function = Given(world.rank, NARROW["fp16"], bad, bad_steps=(2, 3) if mine else ())
    trainer = trainer_of(world, function, "fp16", Adam(0.01), loss_scale=LossScale(16, growth_interval=2))
    plain = trainer_of(world, Given(world.rank, NARROW["fp16"]), "fp16", Adam(0.01), loss_scale=LossScale(1))
    found, states = [], [bits(trainer)]
    for _ in range(5):
        found.append(trainer.step())
        states.append(bits(trainer))
    assert [(step.number, step.skipped, step.loss_scale) for step in found] == [
        (1, False, 16),
        (2, True, 16),
        (3, True, 8),
        (4, False, 4),
        (5, False, 4),
    ]
    assert function.scales == [16, 16, 8, 4, 4]
    assert [step.learning_rate for step in found] == [0.01, 0, 0, 0.01, 0.01]
    assert [step.loss for step in found] == [1, 2, 3, 4, 5]
    assert trainer.adapter.loss_scale.state() == {"value": 8.0, "good_steps": 0, "skipped_steps": 2}
    kept = [name for name in states[0] if name.startswith(("adapter/parameters", "adapter/optimizer"))]
    assert len(kept) == 2 * 3 + 1  # parameters, both moments, and the optimizer's step
    for name in kept:
        assert states[1][name] == states[2][name] == states[3][name] != states[4][name]
    # The run then goes on as if no step had been skipped: after as many good steps, the bits are the same.
    for _ in range(3):
        plain.step()
    assert {name: states[5][name] for name in kept} == {name: bits(plain)[name] for name in kept}
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_a_scale_that_is_too_large_finds_its_way_down(world: World) -> None:
    """The largest gradient is 2 on a few ranks, and fp16 ends at 65504. A scale of 2^15 is too large, 2^14 is not."""
    trainer = trainer_of(world, Given(world.rank, NARROW["fp16"]), "fp16", SGD(0.1), loss_scale=LossScale(2.0**20))
    steps = [trainer.step() for _ in range(8)]
    assert [step.skipped for step in steps] == [True] * 6 + [False] * 2
    assert trainer.adapter.loss_scale.value == 2.0**14


def test_infinity_of_a_rank_without_samples_does_not_count(world: World) -> None:
    counts = world.rank == world.size - 1
    function = Given(world.rank, NARROW["fp16"], bad_steps=() if counts else (1,))
    trainer = trainer_of(world, function, "fp16", SGD(0.5), loss_scale=LossScale(16), weight=3 if counts else 0)
    assert not trainer.step().skipped
    expected = 1 - 0.5 * (GRADIENTS + (world.size - 1) / 4)
    assert trainer.adapter.parameters()["w"].tolist() == expected.tolist()  # all numbers are exact


def test_at_a_scale_of_1_it_is_an_error_again(world: World) -> None:
    odd = world.size - 1
    function = Given(world.rank, NARROW["fp16"], bad_steps=(1, 2, 3) if world.rank == odd else ())
    trainer = trainer_of(world, function, "fp16", SGD(0.1), loss_scale=LossScale(4))
    assert [trainer.step().skipped for _ in range(2)] == [True, True]
    before = bits(trainer)
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert text.startswith(f"{world.name(odd)}: the gradient of w holds NaN or infinity")
    assert bits(trainer) == before
    assert not trainer.step().skipped  # the error leaves nothing behind


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_without_a_loss_scale_it_is_an_error(world: World, precision: str) -> None:
    dtype = NARROW.get(precision, FLOAT32)
    function = Given(world.rank, dtype, numpy.nan, bad_steps=(1,) if world.rank == 0 else ())
    trainer = trainer_of(world, function, precision, SGD(0.1))
    assert trainer.adapter.loss_scale is None
    assert "the gradient of w holds NaN" in error_on_all(world, NonFiniteError, trainer.step)
    step = trainer.step()
    assert (step.skipped, step.loss_scale) == (False, None)
    assert function.scales == [None, None]


@pytest.mark.parametrize("first", ["missing", "infinite"])
def test_a_missing_gradient_is_an_error_whatever_the_scale(world: World, first: str) -> None:
    """A gradient is missing on the first rank and infinite on the last one, or the reverse."""
    skip_alone(world)
    missing = world.rank == (0 if first == "missing" else world.size - 1)
    infinite = world.rank == (world.size - 1 if first == "missing" else 0)

    def function(parameters: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        on_gradient("w", numpy.full(3, numpy.inf if infinite else 1, numpy.float16))
        if not missing:
            on_gradient("b", numpy.ones((2, 2), numpy.float16))
        return 0.0

    trainer = trainer_of(world, function, "fp16", SGD(0.1))
    before = bits(trainer)
    kind = MissingGradientError if first == "missing" else NonFiniteError
    error_on_all(world, kind, trainer.step)
    assert bits(trainer) == before


def test_ranks_that_differ_in_the_scale(world: World) -> None:
    skip_alone(world)
    odd = world.size - 1
    scale = LossScale(8 if world.rank == odd else 4)
    trainer = trainer_of(world, Given(world.rank, NARROW["fp16"]), "fp16", SGD(0.1), loss_scale=scale)
    text = error_on_all(world, MismatchError, trainer.step)
    assert text.startswith(f"{world.name(odd)}: the loss scale is 8.0; {world.name(0)}: the loss scale is 4.0")


def test_ranks_that_differ_in_what_they_skip(world: World) -> None:
    skip_alone(world)
    reducer = GradientReducer(world, [Parameter("a", (2,), FLOAT32)])
    reducer.begin(1)
    reducer.ready(0, numpy.ones(2, FLOAT32))
    error_on_all(world, MismatchError, lambda: reducer.finish(may_skip=world.rank == 0))


def test_a_log_with_a_scale(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    function = Given(world.rank, NARROW["fp16"], bad_steps=(1,))
    parameters = {"w": numpy.ones(3, FLOAT32), "b": numpy.zeros((2, 2), FLOAT32)}

    def build(world: World) -> Parts:
        adapter = ArrayFunction(function, parameters, SGD(0.5), precision="fp16", loss_scale=LossScale(2048))
        return Parts(adapter, Sync(), Samples(1))

    Trainer(build, [StopAtStep(2), Log(seconds=0)]).run()
    lines = capsys.readouterr().out.splitlines()
    if world.is_root:
        assert re.search(r"step 1/2 \| loss 1\.0000 \| lr 0 \|.* left \| loss scale 1024, 1 skipped", lines[0])
        assert re.search(r"step 2/2 \| loss 2\.0000 \| lr 0\.5 \|.* left \| loss scale 1024, 1 skipped", lines[1])
