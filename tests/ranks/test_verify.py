"""The record of `mpitrain verify` on any number of ranks, against the same values computed by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    Checkpoint,
    Evaluation,
    Hook,
    Parts,
    Step,
    StopAtStep,
    Sync,
    Trainer,
    World,
    evaluate,
)
from mpitrain.collectives.trees import ArrayTrees
from mpitrain.context import VerifyTask
from mpitrain.data import ArrayData
from mpitrain.errors import MpitrainError
from mpitrain.optim import SGD
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.verify.fingerprint import distance, sample_hashes, sketch
from mpitrain.verify.record_file import MEAN, STEP, SUM, Line, RunRecord, make_record, read_record
from mpitrain.verify.run_record import RecordedTrees, Recorder
from mpitrain.world.shard import part_of

from .common import error_on_all

X = numpy.random.default_rng(0).standard_normal((23, 4))
Y = numpy.random.default_rng(1).standard_normal(23)
BATCH, RATE = 9, 0.05


def recording(world: World, folder: Path, steps: int) -> World:
    """The world as `init` makes it with these settings."""
    own = world.replaced(context=replace(world.context, verify=VerifyTask(str(folder), steps)))
    if world.is_root and folder.is_dir():
        make_record(folder)
    recorder = Recorder(own)
    return own.replaced(observer=recorder, make_arrays=lambda its: RecordedTrees(ArrayTrees(its), recorder))


def record_of(world: World, folder: Path) -> RunRecord:
    world.barrier()
    return read_record(folder)


def regression(parameters: dict, batch: tuple, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0


def build(world: World) -> Parts:
    adapter = ArrayFunction(regression, {"w": numpy.zeros(4)}, SGD(RATE))
    return Parts(adapter, Sync(), ArrayData(world, (X, Y), global_batch=BATCH, shuffle=False))


def by_hand(steps: int) -> list[tuple[slice, float, numpy.ndarray, numpy.ndarray]]:
    """Samples, loss, gradient and parameters of each step, of whole batches in one process."""
    w, found = numpy.zeros(4), []
    for number in range(steps):
        begin = BATCH * (number % 3)
        its = slice(begin, min(begin + BATCH, len(X)))
        error = X[its] @ w - Y[its]
        gradient = 2 * X[its].T @ error / len(error)
        w = w - RATE * gradient
        found.append((its, float((error**2).mean()), gradient, w))
    return found


def check_samples(world: World, line: Line, batch: Any, hashes: list[str], *, weighted: bool = True) -> None:
    parts = [part_of(len(batch), rank, world.size) for rank in range(world.size)]
    assert line.samples == [hashes[part] for part in parts]
    assert line.weights == ([part.stop - part.start for part in parts] if weighted else [])


def test_a_trainer_is_recorded(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 steps, one of them with 5 samples; hooks that write are left out, and nothing after the run is done."""
    own = recording(world, shared, 4)
    monkeypatch.setattr("mpitrain.training.trainer.init", lambda: own)
    calls: list[int] = []

    class Note(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            calls.append(step.number)

    def metrics(trainer: Trainer) -> dict[str, float]:
        return evaluate(world, lambda part: {"mean": float(part.mean())}, Y)

    hooks = [StopAtStep(100), Note(), Evaluation(3, metrics), Checkpoint(shared / "checkpoints", 1)]
    own.mean(numpy.ones(3))  # before the Trainer: of no interest
    trainer = Trainer(build, hooks)
    with pytest.raises(SystemExit) as caught:
        trainer.run()
    assert caught.value.code == 0
    assert calls == [1, 2, 3, 4]
    assert not (shared / "checkpoints").exists()
    record = record_of(world, shared)
    assert record.num_ranks == world.size
    assert [(line.number, line.kind, line.precision) for line in record.lines] == [
        (number, STEP, "float64") for number in (1, 2, 3, 4)
    ]
    for line, (its, loss, gradient, w) in zip(record.lines, by_hand(4), strict=True):
        check_samples(world, line, X[its], sample_hashes((X[its], Y[its])))
        assert line.loss == pytest.approx(loss, rel=1e-12)
        assert line.learning_rate == RATE
        found, expected = line.tensors["w"], sketch("w", gradient)
        assert distance(found, expected) <= 1e-12 * expected["norm"]
        assert found["norm"] == pytest.approx(float(numpy.linalg.norm(gradient)), rel=1e-12)
        assert found["dtype"] == "float64"
        assert distance(line.parameters["w"], sketch("w", w)) <= 1e-12
    assert [line.before for line in record.lines] == [{"w": sketch("w", numpy.zeros(4))}, {}, {}, {}]
    assert [sorted(line.metrics) for line in record.lines] == [[], [], ["mean"], ["mean"]]
    assert record.lines[3].metrics["mean"] == pytest.approx(float(Y.mean()), rel=1e-12)


def test_calls_are_recorded(world: World, shared: Path) -> None:
    own = recording(world, shared, 3)
    batches = [X[:9], X[9:18], X[18:]]
    results: list[Any] = []
    with pytest.raises(SystemExit):
        for part in own.shard(batches):
            if len(results) == 1:
                results.append(own.sum({"n": len(part), "x": [part.sum(axis=0)]}))
            else:
                # A rank without samples must not spoil the result.
                mean = part.mean(axis=0) if len(part) else numpy.full(4, numpy.nan)
                results.append(own.mean(mean, weight=len(part)))
    assert len(results) == 2  # the third call has ended it
    lines = record_of(world, shared).lines
    assert [line.kind for line in lines] == [MEAN, SUM, MEAN]
    for line, batch in zip(lines, batches, strict=True):
        check_samples(world, line, batch, sample_hashes(batch), weighted=line.kind != SUM)
    for number in (0, 2):
        expected = batches[number].mean(axis=0)
        found = lines[number].tensors
        assert list(found) == ["the result"]
        assert distance(found["the result"], sketch("the result", expected)) <= 1e-12
    assert list(lines[1].tensors) == ["['n']", "['x'][0]"]
    assert lines[1].tensors["['n']"]["norm"] == 9


def test_arrays_of_world_sync_are_parameters(world: World, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call records the arrays that the script still has, but no numbers, integers and calls of mpitrain.jax."""
    own = recording(world, shared, 4)
    tree = own.broadcast({"w": numpy.zeros(3), "b": numpy.ones(2, "float32"), "seed": 7, "order": numpy.arange(5)})
    other = own.broadcast(numpy.ones(2))
    again = own.broadcast({"w": numpy.full(3, 5.0)})
    w = tree["w"]
    own.mean(1.0)
    w += 2
    assert own.observer is not None
    own.observer.saw_parameters({"1/w": numpy.full(4, 3.0)})
    own.mean(1.0)
    del other
    own.mean(1.0)
    again["w"] *= 2
    with pytest.raises(SystemExit):
        own.mean(1.0)
    first, second, third, fourth = (line.before for line in record_of(world, shared).lines)
    assert first == {
        "['w']": sketch("['w']", numpy.zeros(3)),
        "['b']": sketch("['b']", numpy.ones(2, "float32")),
        "the array": sketch("the array", numpy.ones(2)),
        "['w'] (2)": sketch("['w'] (2)", numpy.full(3, 5.0)),
    }
    assert second == {"['w']": sketch("['w']", numpy.full(3, 2.0)), "1/w": sketch("1/w", numpy.full(4, 3.0))}
    assert third == {}
    assert fourth == {"['w'] (2)": sketch("['w'] (2)", numpy.full(3, 10.0))}
    said = [line.removeprefix("mpitrain verify: ") for line in capsys.readouterr().out.splitlines()]
    if world.size > 1:  # the run on one rank has said it
        assert said == []
    else:
        assert len(said) == 2
        assert "the samples of world.shard, and ['b'], ['w'], the array, ['w'] (2) as each call finds them." in said[0]
        assert said[1].startswith(
            "the array: not seen from call 3 on. The script has replaced the array that world.broadcast"
        )


def test_a_record_that_cannot_be_written(world: World, shared: Path) -> None:
    text = error_on_all(world, MpitrainError, lambda: recording(world, shared / "nowhere", 1))
    assert text == (
        f"{world.name(0)}, begin the record for mpitrain verify: OSError: the record {shared}/nowhere/record.jsonl "
        f"cannot be opened (No such file or directory). It must be the file that mpitrain verify "
        f"has made: -rw-------, owner {os.geteuid()}, 1 links. If rank 0 runs "
        "on another host, use mpitrain verify --directory with a folder that both hosts share"
    )


def test_a_reducer_of_the_scripts_own_is_recorded(world: World, shared: Path) -> None:
    """The record has the reducer's steps, and no calls of world.mean between them. The last step ends the script.

    A reducer is known when its first step ends. The samples before a world.mean in that step are not lost.
    """
    own = recording(world, shared, 2)
    reducer = GradientReducer(own, [Parameter("w", (4,), numpy.dtype("float64"))])
    finished = 0
    with pytest.raises(SystemExit) as caught:
        for part in own.shard([X[:9], X[9:18], X[18:]]):
            if not finished:
                own.mean(1.0)
            reducer.begin(len(part))
            reducer.ready(0, part.mean(axis=0) if len(part) else numpy.zeros(4))
            reducer.finish()
            finished += 1
            own.mean(1.0)
    assert (caught.value.code, finished) == (0, 1)
    reducer.close()
    lines = record_of(world, shared).lines
    assert [line.kind for line in lines] == [STEP, STEP]
    for line, batch in zip(lines, [X[:9], X[9:18]], strict=True):
        check_samples(world, line, batch, sample_hashes(batch))
        assert distance(line.tensors["w"], sketch("w", batch.mean(axis=0))) <= 1e-12


def test_samples_that_are_no_arrays_are_not_seen(world: World, shared: Path) -> None:
    own = recording(world, shared, 2)
    assert own.observer is not None
    own.observer.saw("text" if world.rank == world.size - 1 else X)
    own.mean(1.0)
    own.observer.saw(X[:2])
    with pytest.raises(SystemExit):
        own.mean(1.0)
    assert [line.samples for line in record_of(world, shared).lines] == [None, [sample_hashes(X[:2])] * world.size]
