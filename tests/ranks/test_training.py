"""Training on any number of ranks is training on one: parameters, losses, metrics, checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpitrain
from models import mlp
from mpitrain import (
    ArrayData,
    ArrayFunction,
    Checkpoint,
    Evaluate,
    Hook,
    Log,
    Parts,
    Sgd,
    Step,
    StopAtStep,
    Sync,
    Trainer,
    World,
    evaluate,
)
from mpitrain.compression import CODECS
from mpitrain.config import read_config
from mpitrain.errors import (
    ConfigError,
    DataError,
    GradientError,
    MismatchError,
    MissingGradientError,
    MpitrainError,
    NonFiniteError,
)
from mpitrain.training.checkpoint.names import split
from mpitrain.training.data.order import permuted

from .common import assert_same_bits, error_on_all, named_ranks, skip_alone
from .placements import placed

INPUTS, HIDDEN, CLASSES = 6, 5, 3
RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.01


def samples_of(count: int, seed: int = 7) -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(seed)
    return rng.standard_normal((count, INPUTS)), rng.integers(0, CLASSES, count)


def initial_parameters(hidden: int = HIDDEN) -> dict[str, numpy.ndarray]:
    return mlp.initial(
        numpy.random.default_rng(1), numpy, inputs=INPUTS, hidden=(hidden,), classes=CLASSES, dtype="float64"
    )


def builder(
    count: int,
    global_batch: int,
    *,
    optimizer: Callable[[], Any] = lambda: Sgd(RATE, momentum=MOMENTUM, weight_decay=DECAY),
    function: Any = mlp.loss_and_gradients,
    hidden: int = HIDDEN,
    seed: int = 3,
    shuffle: bool = True,
) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        data = ArrayData(world, samples_of(count), global_batch=global_batch, seed=seed, shuffle=shuffle)
        return Parts(ArrayFunction(function, initial_parameters(hidden), optimizer()), Sync(), data)

    return build


class Record(Hook):
    """Keeps every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Everything that a checkpoint keeps."""
    return {
        name: value.tobytes() if isinstance(value, numpy.ndarray) else repr(value).encode()
        for part in split(trainer.state())
        for name, value in part.items()
    }


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- the same as one process ----------------------------------------------------------------------------------------


def bare_numpy(count: int, global_batch: int, steps: int) -> tuple[dict[str, numpy.ndarray], list[float], list[int]]:
    """The same training without the model's code, and of mpitrain the order of samples alone: one process."""
    x, y = samples_of(count)
    w = {name: value.copy() for name, value in initial_parameters().items()}
    velocity = {name: numpy.zeros_like(value) for name, value in w.items()}
    losses, sizes = [], []
    order, epoch = [], 0
    for _ in range(steps):
        if not len(order):
            order = permuted(numpy.arange(count), count, (3, epoch))
            epoch += 1
        chosen, order = order[:global_batch], order[global_batch:]
        inputs, labels = x[chosen], y[chosen]
        hidden = inputs @ w["dense1.weight"] + w["dense1.bias"]
        active = numpy.where(hidden > 0, hidden, 0)
        logits = active @ w["dense2.weight"] + w["dense2.bias"]
        probabilities = numpy.exp(logits) / numpy.exp(logits).sum(axis=1)[:, None]
        losses.append(float(-numpy.log(probabilities[numpy.arange(len(labels)), labels]).mean()))
        sizes.append(len(labels))
        d_logits = (probabilities - numpy.eye(CLASSES)[labels]) / len(labels)
        d_hidden = (d_logits @ w["dense2.weight"].T) * (hidden > 0)
        gradients = {
            "dense1.weight": inputs.T @ d_hidden,
            "dense1.bias": d_hidden.sum(axis=0),
            "dense2.weight": active.T @ d_logits,
            "dense2.bias": d_logits.sum(axis=0),
        }
        for name, gradient in gradients.items():
            decay = DECAY if name.endswith("weight") else 0.0
            velocity[name] = MOMENTUM * velocity[name] + gradient + decay * w[name]
            w[name] = w[name] - RATE * velocity[name]
    return w, losses, sizes


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


def test_batches_smaller_than_the_ranks_occur(world: World) -> None:
    """The case above does have a last batch with fewer samples than ranks, from 3 ranks on."""
    data = ArrayData(world, samples_of(71), global_batch=23)
    assert data.steps_per_epoch == 4
    assert [sum(world.allgather(next(data)[1])) for _ in range(5)] == [23, 23, 23, 2, 23]


def test_ranks_that_start_from_different_parameters_get_those_of_rank_0(world: World) -> None:
    def build(world: World) -> Parts:
        parts = builder(20, 10)(world)
        parts.adapter.load_parameters({name: value + world.rank for name, value in parts.adapter.parameters().items()})
        return parts

    trainer = Trainer(build)
    for name, value in initial_parameters().items():
        assert trainer.adapter.parameters()[name].tobytes() == value.tobytes()


# -- evaluate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 7, 64, 101])
@pytest.mark.parametrize("samples_at_once", [1, 4, 1000])
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


def test_evaluate_refuses_what_it_cannot_count(world: World) -> None:
    def never(_: Any) -> dict[str, float]:
        raise AssertionError

    with pytest.raises(DataError, match="no samples to evaluate"):
        evaluate(world, never, numpy.empty((0, 3)))
    with pytest.raises(DataError, match=r"found \[0\] 5, \[1\] 4"):
        evaluate(world, never, (numpy.zeros(5), numpy.zeros(4)))
    with pytest.raises(ConfigError, match="samples_at_once=0; it must be at least 1"):
        evaluate(world, never, numpy.zeros(5), samples_at_once=0)


def test_evaluate_of_different_data(world: World) -> None:
    skip_alone(world)
    count = 6 if world.rank == world.size - 1 else 5
    text = error_on_all(world, MismatchError, lambda: evaluate(world, lambda _: {}, numpy.zeros(count)))
    assert "the tree float64 (6,)" in text
    assert "the tree float64 (5,)" in text


def test_evaluate_hook(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    hook = Evaluate(2, lambda trainer: {"step": trainer.step_number, "half": 0.5})
    Trainer(builder(20, 10), [StopAtStep(5), hook]).run()
    assert hook.results == {number: {"step": number, "half": 0.5} for number in (2, 4, 5)}
    lines = [f"step {number}: step {number}.0000, half 0.5000\n" for number in (2, 4, 5)]
    assert capsys.readouterr().out == ("".join(lines) if world.rank == 0 else "")


# -- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "global_batch"), [(50, 16), (23, 7), (9, 9)])
def test_an_epoch_has_every_sample_once(world: World, count: int, global_batch: int, shuffle: bool) -> None:
    data = ArrayData(
        world, {"x": numpy.arange(count), "y": [-numpy.arange(count)]}, global_batch=global_batch, shuffle=shuffle
    )
    assert data.steps_per_epoch == -(-count // global_batch)
    epochs = []
    for epoch in range(3):
        order = []
        for _ in range(data.steps_per_epoch):
            batch, weight = next(data)
            assert len(batch["x"]) == weight
            assert (batch["y"][0] == -batch["x"]).all()
            order.append(batch["x"].tolist())
            assert data.epoch == epoch
        every = world.allgather(order)
        epochs.append([x for step in zip(*every, strict=True) for part in step for x in part])
        assert sorted(epochs[-1]) == list(range(count))
    if shuffle:
        assert epochs[0] != epochs[1] != epochs[2]
    else:
        assert epochs == [list(range(count))] * 3


def test_data_goes_on_where_it_stood(world: World) -> None:
    def some(data: ArrayData, steps: int) -> list[list[int]]:
        return [next(data)[0].tolist() for _ in range(steps)]

    whole = ArrayData(world, numpy.arange(20), global_batch=8, seed=5)
    expected = some(whole, 8)
    for steps in range(8):
        first = ArrayData(world, numpy.arange(20), global_batch=8, seed=5)
        assert some(first, steps) == expected[:steps]
        second = ArrayData(world, numpy.arange(20), global_batch=8, seed=5)
        second.restore(json.loads(json.dumps(first.state())))
        assert some(second, 8 - steps) == expected[steps:]


@pytest.mark.parametrize(
    ("arrays", "kind", "text"),
    [
        (numpy.empty((0, 3)), DataError, "the data set has no samples"),
        ((numpy.zeros(20), numpy.zeros(21)), DataError, r"found \[0\] 20, \[1\] 21"),
        ((numpy.zeros(20), 1.0), DataError, r"found \[0\] 20, \[1\] a number"),
        ({}, DataError, "found no arrays"),
    ],
    ids=["empty", "unequal", "number", "nothing"],
)
def test_data_that_cannot_be_used(world: World, arrays: Any, kind: type[MpitrainError], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        ArrayData(world, arrays, global_batch=10)
    assert caught.value.known_everywhere


def test_too_few_samples_for_the_ranks(world: World) -> None:
    skip_alone(world)
    few = world.size - 1
    with pytest.raises(DataError, match=f"has {few} samples for {world.size} ranks; start at most {few} ranks"):
        ArrayData(world, numpy.zeros(few), global_batch=100)
    with pytest.raises(ConfigError, match=f"global_batch={few} for {world.size} ranks"):
        ArrayData(world, numpy.zeros(100), global_batch=few)
    assert ArrayData(world, numpy.zeros(world.size), global_batch=world.size).steps_per_epoch == 1


@pytest.mark.parametrize("global_batch", [10.0, "10", True, None], ids=repr)
def test_a_global_batch_that_is_no_int(world: World, global_batch: Any) -> None:
    text = re.escape(f"global_batch={global_batch!r}; it must be an int")
    with pytest.raises(ConfigError, match=text) as caught:
        ArrayData(world, numpy.zeros(20), global_batch=global_batch)
    assert caught.value.known_everywhere


def test_a_global_batch_of_numpy(world: World) -> None:
    data = ArrayData(world, numpy.zeros(20), global_batch=numpy.int32(10))  # type: ignore[arg-type]
    assert type(data.global_batch) is int


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"arrays": numpy.zeros((31, 2))}, "the tree float64 (31, 2)"),
        ({"arrays": numpy.zeros((30, 2), "f4")}, "the tree float32 (30, 2)"),
        ({"global_batch": 15}, "global_batch=15 seed=0 shuffle=True"),
        ({"seed": 1}, "global_batch=10 seed=1 shuffle=True"),
        ({"shuffle": False}, "global_batch=10 seed=0 shuffle=False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_with_different_data(world: World, other: dict[str, Any], text: str) -> None:
    skip_alone(world)
    for odd in range(world.size):
        options = {"arrays": numpy.zeros((30, 2)), "global_batch": 10} | (other if world.rank == odd else {})
        found = error_on_all(world, MismatchError, lambda options=options: ArrayData(world, **options))
        named, root = named_ranks(world, odd)
        assert f"{named if odd else root}: {text}; " in found


# -- hooks --------------------------------------------------------------------------------------------------------


def test_a_run_that_nothing_ends(world: World) -> None:
    with pytest.raises(ConfigError, match="nothing ends this run; add the hook StopAtStep"):
        Trainer(builder(20, 10)).run()


def test_the_earliest_stop_counts(world: World) -> None:
    trainer = Trainer(builder(20, 10), [StopAtStep(5), StopAtStep(3), StopAtStep(9)])
    trainer.run()
    assert (trainer.step_number, trainer.last_step) == (3, 3)


@pytest.mark.parametrize("make", [lambda: StopAtStep(0), lambda: Evaluate(0, dict), lambda: Checkpoint("x", 0)])
def test_steps_start_at_1(make: Callable[[], Hook]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make()


def test_hooks_are_called_in_order(world: World) -> None:
    calls: list[str] = []

    class Note(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_run(self, trainer: Trainer) -> None:
            calls.append(f"{self.name} before {trainer.step_number}")

        def after_step(self, trainer: Trainer, step: Step) -> None:
            calls.append(f"{self.name} step {step.number}")

        def after_run(self, trainer: Trainer) -> None:
            calls.append(f"{self.name} after {trainer.step_number}")

    Trainer(builder(20, 10), [Note("a"), StopAtStep(1), Note("b")]).run()
    assert calls == ["a before 0", "b before 0", "a step 1", "b step 1", "a after 1", "b after 1"]


def test_log_is_on_rank_0_only(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record()
    Trainer(builder(25, 10), [StopAtStep(4), Log(seconds=0.0), record]).run()
    output = capsys.readouterr()
    assert output.err == ""
    if world.rank:
        assert output.out == ""
        return
    pattern = r"epoch (\d+) step (\d+)/4 \| loss ([\d.]+) \| lr (\S+) \| ([\d,]+) samples/s \| (\d+:\d\d:\d\d) left"
    found = [re.fullmatch(pattern, line) for line in output.out.splitlines()]
    assert all(found)
    assert [(its[1], its[2]) for its in found if its] == [("1", "1"), ("1", "2"), ("1", "3"), ("2", "4")]
    assert [its[3] for its in found if its] == [f"{step.loss:.4f}" for step in record.steps]
    assert {its[4] for its in found if its} == {"0.1"}
    assert found[-1][6] == "0:00:00"


def test_log_shows_the_overlap_between_nodes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    skip_alone(world)
    record = Record()
    trainer = Trainer(builder(25, 10), [StopAtStep(3), Log(seconds=0.0), record])
    trainer.world = placed(world, "alone on each node")
    trainer.run()
    found = re.findall(r" left \| wire ([\d.]+) ms, (\d+)% hidden\n", capsys.readouterr().out)
    shown = [(f"{step.overlap.wire_seconds * 1e3:.1f}", f"{step.overlap.hidden * 100:.0f}") for step in record.steps]
    assert found == (shown if world.is_root else [])


def test_the_parts_of_a_step_fit_into_it(world: World) -> None:
    record = Record()
    Trainer(builder(45, 14), [StopAtStep(5), record]).run()
    for step in record.steps:
        assert step.overlap.compute_seconds > 0
        assert step.overlap.exposed_seconds > 0
        assert step.overlap.compute_seconds + step.overlap.exposed_seconds <= step.seconds
        assert 0 < step.overlap.wire_seconds <= step.seconds


def test_log_keeps_to_its_interval(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(builder(25, 10), [StopAtStep(6), Log(seconds=1e6)]).run()
    steps = re.findall(r"step (\d+)/6", capsys.readouterr().out)
    assert steps == (["1", "6"] if world.rank == 0 else [])


# -- compression ----------------------------------------------------------------------------------------------------


def losses_with(world: World, monkeypatch: pytest.MonkeyPatch, compression: str) -> list[float]:
    """Of a Trainer in a world whose ranks are on nodes of their own, with this MPITRAIN_COMPRESSION."""
    own = replace(placed(world, "alone on each node"), config=read_config({"MPITRAIN_COMPRESSION": compression}, {}))
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    samples = [part.astype("float32") if part.dtype.kind == "f" else part for part in samples_of(300)]

    def build(world: World) -> Parts:
        rng = numpy.random.default_rng(1)
        parameters = mlp.initial(rng, numpy, inputs=INPUTS, hidden=(40,), classes=CLASSES)
        adapter = ArrayFunction(mlp.loss_and_gradients, parameters, Sgd(RATE, momentum=MOMENTUM))
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
    # A rounding of one in a hundred of the gradients must not show in the loss of a short training.
    numpy.testing.assert_allclose(short, full, rtol=0.01)
    assert full[-1] < 0.95 * full[0]


# -- steps that fail ----------------------------------------------------------------------------------------------


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


def test_every_public_name_is_here(world: World) -> None:
    """A trainer of the package itself, as a user writes it."""
    assert mpitrain.Trainer is Trainer
    assert Trainer(builder(20, 10)).world is world
