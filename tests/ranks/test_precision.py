"""Mixed precision: 16 bits in the model, float32 elsewhere; steps that all ranks skip, or none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Checkpoint, GradientReducer, Log, Parameter, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import CheckpointError, ConfigError, MismatchError, MissingGradientError, NonFiniteError
from mpitrain.optim import SGD, Adam, LossScale

from .common import assert_same_bits, error_on_all, skip_alone
from .precisions import FLOAT32, GRADIENTS, NARROW, Given, trainer_of
from .trainings import Record, bits, ran


def mean_of(world: World) -> numpy.ndarray:
    """The weighted mean gradient of w, in float64."""
    weights = numpy.arange(1, world.size + 1)
    return GRADIENTS + float((weights * numpy.arange(world.size) / 4).sum() / weights.sum())


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
        for _ in range(3):
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
    whole = ran(builder(), [StopAtStep(30)])
    skipped = whole.adapter.loss_scale.skipped_steps
    assert skipped > 8
    Trainer(builder(), [StopAtStep(17), Checkpoint(shared, steps=100)]).run()
    resumed = ran(builder(), [StopAtStep(30), Checkpoint(shared, steps=100)])
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
    assert [step.skipped for step in found] == [False, True, True, False, False]
    assert [step.loss_scale for step in found] == [16, 16, 8, 4, 4]
    assert function.scales == [16, 16, 8, 4, 4]
    assert [step.learning_rate for step in found] == [0.01, 0, 0, 0.01, 0.01]
    assert [step.loss for step in found] == [1, 2, 3, 4, 5]
    assert trainer.adapter.loss_scale.state() == {"value": 8.0, "good_steps": 0, "skipped_steps": 2}
    kept = [name for name in states[0] if name.startswith(("adapter/parameters", "adapter/optimizer"))]
    assert len(kept) == 2 * 3 + 1  # parameters, both moments, and the optimizer's step
    for name in kept:
        assert states[1][name] == states[2][name] == states[3][name] != states[4][name]
    # The run then continues as if no step had been skipped: after as many good steps, the bits are the same.
    for _ in range(3):
        plain.step()
    assert {name: states[5][name] for name in kept} == {name: bits(plain)[name] for name in kept}
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_a_scale_that_is_too_large_finds_its_way_down(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest gradient is 2 on a few ranks, and fp16 ends at 65504. A scale of 2^15 is too large, 2^14 is not."""
    trainer = trainer_of(world, Given(world.rank, NARROW["fp16"]), "fp16", SGD(0.1), loss_scale=LossScale(2.0**20))
    log, trainer.last_step = Log(seconds=0), 8
    log.before_run(trainer)
    steps = []
    for _ in range(8):
        steps.append(trainer.step())
        log.after_step(trainer, steps[-1])
    assert [step.skipped for step in steps] == [True] * 6 + [False] * 2
    assert trainer.adapter.loss_scale.value == 2.0**14
    lines = capsys.readouterr().out.splitlines()
    if world.is_root:
        assert re.search(r"step 1/8 \| loss 1\.0000 \| lr 0 \|.* left \| loss scale 524288, 1 skipped", lines[0])
        assert re.search(r"step 8/8 \| loss 8\.0000 \| lr 0\.1 \|.* left \| loss scale 16384, 6 skipped", lines[7])


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


def test_ranks_that_differ_in_the_scale_or_in_what_they_skip(world: World) -> None:
    skip_alone(world)
    odd = world.size - 1
    scale = LossScale(8 if world.rank == odd else 4)
    trainer = trainer_of(world, Given(world.rank, NARROW["fp16"]), "fp16", SGD(0.1), loss_scale=scale)
    text = error_on_all(world, MismatchError, trainer.step)
    assert text.startswith(f"{world.name(odd)}: the loss scale is 8.0; {world.name(0)}: the loss scale is 4.0")
    reducer = GradientReducer(world, [Parameter("a", (2,), FLOAT32)])
    reducer.begin(1)
    reducer.ready(0, numpy.ones(2, FLOAT32))
    error_on_all(world, MismatchError, lambda: reducer.finish(may_skip=world.rank == 0))
