"""Training on any number of ranks is training on one: parameters, losses, metrics, checkpoints."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpitrain
from models import mlp
from mpitrain import (
    Adam,
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
    warmup_cosine,
)
from mpitrain.compression import CODECS
from mpitrain.config import read_config
from mpitrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GradientError,
    MismatchError,
    MissingGradientError,
    MpitrainError,
    NonFiniteError,
)
from mpitrain.training import checkpoint

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
        for name, value in checkpoint._flatten(trainer.state())
    }


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- the same as one process ----------------------------------------------------------------------------------------


def bare_numpy(count: int, global_batch: int, steps: int) -> tuple[dict[str, numpy.ndarray], list[float], list[int]]:
    """The same training without mpitrain and without the model's code: one process, whole batches."""
    x, y = samples_of(count)
    w = {name: value.copy() for name, value in initial_parameters().items()}
    velocity = {name: numpy.zeros_like(value) for name, value in w.items()}
    losses, sizes = [], []
    order, epoch = [], 0
    for _ in range(steps):
        if not len(order):
            order = numpy.arange(count)
            numpy.random.default_rng((3, epoch)).shuffle(order)
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


# -- checkpoints --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: Sgd(RATE),
    "momentum": lambda: Sgd(RATE, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY),
    "adam": lambda: Adam(warmup_cosine(0.01, warmup_steps=3, total_steps=12), clip_norm=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(world: World, shared: Path, optimizer: str) -> None:
    """10 steps at once, or 5, a checkpoint in the middle of an epoch, a new Trainer and 5 more."""
    build = builder(45, 14, optimizer=OPTIMIZERS[optimizer])
    whole = Record()
    uninterrupted = Trainer(build, [StopAtStep(10), whole])
    uninterrupted.run()

    Trainer(build, [StopAtStep(5), Checkpoint(shared / "new" / "folder", steps=2)]).run()
    record = Record()
    resumed = Trainer(build, [StopAtStep(10), Checkpoint(shared / "new" / "folder", steps=100), record])
    resumed.run()
    assert [step.number for step in record.steps] == [6, 7, 8, 9, 10]
    assert [step.loss for step in record.steps] == [step.loss for step in whole.steps[5:]]
    assert [step.learning_rate for step in record.steps] == [step.learning_rate for step in whole.steps[5:]]
    assert bits(resumed) == bits(uninterrupted)
    world.barrier()
    saved = ["step-00000002", "step-00000004", "step-00000005", "step-00000010"]
    assert names_in(shared / "new" / "folder") == saved


def test_a_checkpoint_of_a_finished_run(world: World, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = builder(20, 10)
    first = Trainer(build, [StopAtStep(4), Checkpoint(shared, steps=4)])
    first.run()
    record = Record()
    again = Trainer(build, [StopAtStep(4), Checkpoint(shared, steps=4), record])
    again.run()
    assert record.steps == []
    assert bits(again) == bits(first)
    text = f"resumed from {shared / 'step-00000004'} at step 4\n"
    assert capsys.readouterr().out == (text if world.rank == 0 else "")


def test_a_checkpoint_fits_any_number_of_ranks(world: World, shared: Path) -> None:
    """Nothing in it comes from a rank: one process alone would have written the same names, cursor and step."""
    trainer = Trainer(builder(45, 14), [StopAtStep(5), Checkpoint(shared, steps=5)])
    trainer.run()
    state = world.broadcast(checkpoint.load(shared / "step-00000005") if world.is_root else None)
    assert state["step"] == 5
    assert state["data"] == {"epoch": 1, "cursor": 14, "seed": 3, "shuffle": True, "num_samples": 45}
    assert set(state["adapter"]["parameters"]) == set(initial_parameters())
    assert state["adapter"]["optimizer"]["step"] == 5
    for name, value in bare_numpy(45, 14, 5)[0].items():
        numpy.testing.assert_allclose(state["adapter"]["parameters"][name], value, rtol=1e-12, atol=1e-14)


def truncate(path: Path) -> None:
    file = path / "arrays.npz"
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "arrays.npz").read_bytes())
    content[200] ^= 1  # inside the first array
    (path / "arrays.npz").write_bytes(content)


def change_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        numbers = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(change(numbers)))

    return apply


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda numbers: {name: value for name, value in numbers.items() if not name.startswith(names)}


DAMAGES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "truncated arrays": (truncate, {}, "cannot read the checkpoint"),
    "flipped bit": (flip_a_bit, {}, "cannot read the checkpoint"),
    "no arrays": (lambda path: (path / "arrays.npz").unlink(), {}, "cannot read the checkpoint"),
    "no json": (lambda path: (path / "state.json").unlink(), {}, "cannot read the checkpoint"),
    "half a json": (lambda path: os.truncate(path / "state.json", 20), {}, "cannot read the checkpoint"),
    "empty json": (lambda path: os.truncate(path / "state.json", 0), {}, "cannot read the checkpoint"),
    "another json": (change_json(lambda _: [1, 2]), {}, "cannot read the checkpoint"),
    "a number for a group": (change_json(lambda old: old | {"adapter": 1}), {}, "cannot read the checkpoint"),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("")), {}, "cannot read the checkpoint"),
    "no step": (change_json(without("step")), {}, "has no entry 'step'"),
    "no data": (change_json(without("data")), {}, "has no entry 'data'"),
    "no optimizer": (change_json(without("adapter")), {}, r"missing \['step'\]"),
    "other model": (
        lambda _: None,
        {"hidden": 4},
        r"has float64 \(6, 5\) for dense1.weight, the model float64 \(6, 4\)",
    ),
    "other optimizer": (lambda _: None, {"optimizer": OPTIMIZERS["adam"]}, r"state for Adam: missing \['first'"),
    "other samples": (lambda _: None, {"count": 21}, "num_samples=20, this run's 21"),
    "other seed": (lambda _: None, {"seed": 4}, "seed=3, this run's 4"),
    "cursor behind the end": (change_json(lambda old: old | {"data/cursor": 21}), {}, "epoch=0 cursor=21; .* 0 to 20"),
    "cursor below 0": (change_json(lambda old: old | {"data/cursor": -1}), {}, "epoch=0 cursor=-1; "),
    "epoch below 0": (change_json(lambda old: old | {"data/epoch": -1}), {}, "epoch=-1 cursor=20; "),
    "other order": (lambda _: None, {"shuffle": False}, "shuffle=True, this run's False"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_cannot_be_used(world: World, shared: Path, damage: str) -> None:
    apply, other, text = DAMAGES[damage]
    Trainer(builder(20, 10), [StopAtStep(2), Checkpoint(shared, steps=1)]).run()
    if world.is_root:
        apply(shared / "step-00000002")
    world.barrier()
    build = builder(**({"count": 20, "global_batch": 10} | other))
    trainer = Trainer(build, [StopAtStep(3), Checkpoint(shared, steps=1)])
    before = {name: value.tobytes() for name, value in trainer.adapter.parameters().items()}
    data_before = trainer.data.state()
    with pytest.raises(CheckpointError, match=text) as caught:
        trainer.run()
    assert caught.value.known_everywhere
    assert trainer.step_number == 0
    assert {name: value.tobytes() for name, value in trainer.adapter.parameters().items()} == before
    assert trainer.data.state() == data_before
    world.barrier()
    assert names_in(shared) == ["step-00000001", "step-00000002"]


def test_a_directory_that_is_none(world: World, shared: Path) -> None:
    """Found before the first step, not after many of them."""
    if world.is_root:
        (shared / "file").write_text("")
    for path in (shared / "file", shared / "file" / "below"):
        trainer = Trainer(builder(20, 10), [StopAtStep(2), Checkpoint(path, steps=1)])
        with pytest.raises(CheckpointError, match=f"cannot look for checkpoints in {path}"):
            trainer.run()
        assert trainer.step_number == 0
    world.barrier()
    assert names_in(shared) == ["file"]


@pytest.mark.parametrize("place", ["arrays", "json", "rename"])
def test_a_full_disk_leaves_the_earlier_checkpoints(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    trainer = Trainer(builder(20, 10), [StopAtStep(4), Checkpoint(shared, steps=2)])

    class FailFromNow(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 3:
                monkeypatch.setattr(*target, full)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"arrays": (numpy, "savez"), "json": (json, "dump"), "rename": (Path, "rename")}[place]
    trainer._hooks = (*trainer._hooks, FailFromNow())
    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint .*step-00000004: .*No space left"
    ) as caught:
        trainer.run()
    assert caught.value.known_everywhere
    world.barrier()
    assert names_in(shared) == ["step-00000002"]
    monkeypatch.undo()
    resumed = Trainer(builder(20, 10), [StopAtStep(4), Checkpoint(shared, steps=2)])
    resumed.run()
    assert bits(resumed) == bits(trainer)


def test_a_checkpoint_is_replaced_and_remains_of_a_killed_process_do_no_harm(tmp_path: Path) -> None:
    for name in (f".writing-00000007-{os.getpid()}", ".writing-00000007-1", ".replaced-00000007-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "arrays.npz").write_text("half")
    for value in (1.0, 2.0):
        path = checkpoint.save(tmp_path, 7, {"a": {"b": numpy.full(3, value)}, "n": 1})
    assert checkpoint.load(path)["a"]["b"].tolist() == [2.0, 2.0, 2.0]
    assert names_in(tmp_path) == ["step-00000007"]


def saved_value(directory: Path) -> float:
    assert names_in(directory) == ["step-00000007"]
    return checkpoint.load(directory / "step-00000007")["n"]


def fail_second_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    calls: list[Path] = []

    def failing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)


def test_a_failed_replacement_keeps_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 7, {"n": 1})
    fail_second_rename(monkeypatch)  # the first moves the old one away
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.save(tmp_path, 7, {"n": 2})
    assert saved_value(tmp_path) == 1


def test_a_run_killed_between_the_renames_loses_nothing_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 7, {"n": 1})
    (tmp_path / "step-00000007").rename(tmp_path / ".replaced-00000007-1")
    with pytest.raises(CheckpointError, match="set"):
        checkpoint.save(tmp_path, 7, {"n": {1, 2}})
    assert saved_value(tmp_path) == 1


def test_directories_are_synced_before_what_depends_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = checkpoint._sync_directory, Path.rename

    def noted_sync(directory: Path) -> None:
        events.append(f"sync {directory.name}")
        sync(directory)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(checkpoint, "_sync_directory", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    checkpoint.save(tmp_path / "new" / "folder", 7, {"n": 1})
    temporary = f".writing-00000007-{os.getpid()}"
    assert events == [f"sync {tmp_path.name}", "sync new", f"sync {temporary}", f"rename {temporary}", "sync folder"]


@pytest.mark.parametrize("value", [numpy.float32(1), {1, 2}, b"bytes"], ids=repr)
def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        checkpoint.save(tmp_path, 7, {"n": value})
    assert names_in(tmp_path) == []


def test_names_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the name 'a/b' holds '/'"):
        checkpoint.save(tmp_path, 7, {"a/b": 1})
    assert names_in(tmp_path) == []


def test_latest_is_by_number_and_ignores_other_names(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "not there") is None
    assert checkpoint.latest(tmp_path) is None
    for name in ("step-00000009", "step-00000100", "step-123456789", "step-x", ".writing-00000200-1", "step-7"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-123456789"


def test_every_public_name_is_here(world: World) -> None:
    """A trainer of the package itself, as a user writes it."""
    assert mpitrain.Trainer is Trainer
    assert Trainer(builder(20, 10)).world is world
