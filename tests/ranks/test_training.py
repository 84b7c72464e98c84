"""Training on any number of ranks is training on one: parameters, losses, evaluation, batches in pieces."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import Accumulate, ArrayFunction, Evaluation, Parts, StopAtStep, Sync, Trainer, World, evaluate
from mpitrain.compression import CODECS
from mpitrain.config import read_config
from mpitrain.data import ArrayData
from mpitrain.errors import (
    ConfigError,
    DataError,
    GradientError,
    MismatchError,
    MissingGradientError,
    MpitrainError,
    NonFiniteError,
)
from mpitrain.job.worlds import make_world
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
    bits,
    builder,
    initial_parameters,
    ran,
    samples_of,
)


@pytest.mark.parametrize(("count", "global_batch"), [(71, 23), (24, 8), (70, 1000)], ids=str)
def test_training_equals_one_process(world: World, count: int, global_batch: int) -> None:
    """Batches that no number of ranks divides; last ones of 2 samples; one batch of everything."""
    record = Record()
    trainer = ran(builder(count, global_batch), [StopAtStep(10), record])
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
    trainer = ran(build, [StopAtStep(25), record])
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
    # What top_k leaves out arrives up to a hundred steps later: tests/ranks/test_gathered.py has what is exact.


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


@pytest.mark.parametrize("count", [1, 2, 7, 101])
@pytest.mark.parametrize("samples_at_once", [1, 4])
def test_evaluate_counts_every_sample_once(world: World, count: int, samples_at_once: int) -> None:
    values = numpy.random.default_rng(count).standard_normal(count)
    seen: list[int] = []

    def metrics(part: Mapping[str, numpy.ndarray]) -> dict[str, float]:
        assert 0 < len(part["x"]) <= samples_at_once
        seen.extend(part["number"].tolist())
        return {"mean": float(part["x"].mean()), "ones": 1.0}

    arrays = {"x": values, "number": numpy.arange(count)}
    result = evaluate(world, metrics, arrays, samples_at_once=samples_at_once)
    assert math.isclose(result["mean"], math.fsum(values) / count, rel_tol=1e-12, abs_tol=1e-15)
    assert result["ones"] == 1.0
    assert [number for its in world.allgather(seen) for number in its] == list(range(count))
    assert len(set(world.allgather(result["mean"]))) == 1


@pytest.mark.parametrize("count", [1, 6, 40, 61])
def test_evaluate_by_virtual_ranks_has_the_same_bits_on_any_ranks(world: World, count: int) -> None:
    """The calls are the same on one rank: samples, their place in memory, and the rounded sum of all."""
    x = numpy.random.default_rng(4).standard_normal((count + 1, 3))[1:]  # begins in the middle of a cache line
    calls: list[tuple[float, int, int]] = []

    def metrics(batch: Any) -> dict[str, float]:
        calls.append((float(batch[0, 0]), len(batch), batch.ctypes.data % 64))
        return {"mean": float(batch.mean()) / 3 * 10.0 ** (len(batch) * 3)}

    with_all = evaluate(world, metrics, x, samples_at_once=4, virtual_ranks=7)
    of_all = [call for of_rank in world.allgather(calls) for call in of_rank]
    calls.clear()
    own = make_world(world.comm.Split(world.rank, 0))
    assert evaluate(own, metrics, x, samples_at_once=4, virtual_ranks=7) == with_all
    assert of_all == calls
    assert sum(size for _, size, _ in calls) == count
    assert {place for *_, place in calls} == {0}


def test_evaluate_refuses_what_it_cannot_count(world: World) -> None:
    def never(_: Any) -> dict[str, float]:
        raise AssertionError

    with pytest.raises(DataError, match="no samples to evaluate"):
        evaluate(world, never, numpy.empty((0, 3)))
    with pytest.raises(DataError, match=r"found \[0\] 5, \[1\] 4"):
        evaluate(world, never, (numpy.zeros(5), numpy.zeros(4)))
    with pytest.raises(ConfigError, match="samples_at_once=0; it must be at least 1"):
        evaluate(world, never, numpy.zeros(5), samples_at_once=0)
    with pytest.raises(ConfigError, match="virtual_ranks=0; it must be at least 1"):
        evaluate(world, never, numpy.zeros(5), virtual_ranks=0)


def test_evaluate_of_different_data(world: World) -> None:
    skip_alone(world)
    count = 6 if world.rank == world.size - 1 else 5
    text = error_on_all(world, MismatchError, lambda: evaluate(world, lambda _: {}, numpy.zeros(count)))
    assert "the tree float64 (6,)" in text
    assert "the tree float64 (5,)" in text


def test_evaluate_hook(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    hook = Evaluation(2, lambda trainer: {"step": trainer.step_number, "half": 0.5})
    Trainer(builder(20, 10), [StopAtStep(5), hook]).run()
    assert hook.results == {number: {"step": number, "half": 0.5} for number in (2, 4, 5)}
    lines = [f"step {number}: step {number}.0000, half 0.5000\n" for number in (2, 4, 5)]
    assert capsys.readouterr().out == ("".join(lines) if world.rank == 0 else "")


def in_pieces(per_rank_batch: int, function: Any = mlp.loss_and_gradients) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        parts = builder(71, 23, function=function)(world)
        return replace(parts, adapter=Accumulate(parts.adapter, per_rank_batch=per_rank_batch))

    return build


@pytest.mark.parametrize("per_rank_batch", [1, 2, 5, "by rank", 1000])
def test_gradients_in_pieces_are_those_of_the_batch(world: World, per_rank_batch: Any) -> None:
    largest = []

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        largest.append(len(batch[0]))
        return mlp.loss_and_gradients(parameters, batch, on_gradient)

    most = 1 + world.rank if per_rank_batch == "by rank" else per_rank_batch
    record = Record()
    trainer = ran(in_pieces(most, function), [StopAtStep(10), record])
    parameters, losses, sizes = bare_numpy(71, 23, 10)
    assert max(largest) <= most
    assert [step.samples for step in record.steps] == sizes
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-12)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, parameters[name], rtol=1e-12, atol=1e-14)
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_one_piece_has_the_same_bits(world: World) -> None:
    plain = ran(builder(71, 23), [StopAtStep(5)])
    trainer = ran(in_pieces(23), [StopAtStep(5)])
    assert bits(trainer) == bits(plain)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("missing", MissingGradientError, "dense1.bias"),
        ("twice", GradientError, "the gradient of dense1.bias was handed in twice for the same samples"),
        ("missing, then twice", GradientError, "the gradient of dense1.bias was handed in twice for the same samples"),
        ("shape", GradientError, r"the gradient of dense1.bias is float64 \(1, 5\); the parameter is float64 \(5,\)"),
    ],
)
def test_a_gradient_that_is_wrong_in_one_piece(world: World, what: str, kind: type[MpitrainError], text: str) -> None:
    pieces = 0

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        nonlocal pieces
        pieces += 1

        def pass_on(name: str, gradient: Any) -> None:
            if name != "dense1.bias" or pieces > 2 or (what == "twice" and pieces == 1):
                on_gradient(name, gradient)
            elif what.startswith("missing") and pieces == 1:
                return
            elif what == "missing":
                on_gradient(name, gradient)
            elif what == "shape":
                on_gradient(name, gradient[None])
            else:
                on_gradient(name, gradient)
                on_gradient(name, gradient)

        return mlp.loss_and_gradients(parameters, batch, pass_on)

    trainer = Trainer(in_pieces(2, function))
    before = {name: value.tobytes() for name, value in trainer.adapter.parameters().items()}
    with pytest.raises(kind, match=text):
        trainer.step()
    assert {name: value.tobytes() for name, value in trainer.adapter.parameters().items()} == before


@pytest.mark.parametrize("per_rank_batch", [0, -1, 2.0, True], ids=repr)
def test_pieces_start_at_1(world: World, per_rank_batch: Any) -> None:
    adapter = ArrayFunction(mlp.loss_and_gradients, initial_parameters(), SGD(RATE))
    with pytest.raises(ConfigError, match=re.escape(f"Accumulate: per_rank_batch={per_rank_batch!r}; it must be a")):
        Accumulate(adapter, per_rank_batch=per_rank_batch)
