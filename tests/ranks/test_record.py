"""The record of a run: a row says what the steps did, over all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, DiLoCo, Evaluation, Hook, Parts, Record, Step, StopAtStep, StopWhen, Trainer, World
from mpitrain.data.order import permuted
from mpitrain.errors import ConfigError
from mpitrain.meters import (
    Communication,
    GpuUtilisation,
    GradientNorm,
    LearningRate,
    Loss,
    Memory,
    Meter,
    Reading,
    Throughput,
)
from mpitrain.optim import SGD, warmup_cosine
from mpitrain.training.meters import combine

from .common import error_on_all
from .test_hooks import Tell, build
from .trainings import Record as KeepSteps


class InMemory:
    """A writer that only keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def open(self, after_step: int) -> None:
        self.rows = [row for row in self.rows if row["step"] <= after_step]

    def write(self, row: Any, events: Any = ()) -> None:
        self.rows.append(dict(row))

    def close(self) -> None: ...


def test_rows_are_what_the_steps_did(world: World) -> None:
    writer, keep = InMemory(), KeepSteps()
    evaluate = Evaluation(4, lambda trainer: {"half": 0.5})
    hooks = [StopAtStep(8), keep, evaluate, Record([writer], steps=3, tokens_per_sample=7)]
    Trainer(build, hooks).run()
    if not world.is_root:
        assert writer.rows == []
    of_ranks = world.allgather(keep.steps)
    rows = world.broadcast_object(writer.rows)
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    assert [row["epoch"] for row in rows] == [1, 2, 2, 3]
    assert [row["samples"] for row in rows] == [13, 18, 26, 36]
    assert [row.get("half") for row in rows] == [None, 0.5, None, 0.5]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0
    for row, (begin, end) in zip(rows, [(0, 3), (3, 4), (4, 6), (6, 8)], strict=True):
        mine = of_ranks[0][begin:end]
        samples = sum(step.samples for step in mine)
        assert row["loss"] == pytest.approx(math.fsum(step.loss * step.samples for step in mine) / samples, rel=1e-14)
        assert row["learning_rate"] == 0.1
        times = [math.fsum(step.seconds for step in its[begin:end]) for its in of_ranks]
        exposed = [math.fsum(step.overlap.exposed_seconds for step in its[begin:end]) for its in of_ranks]
        wire = [math.fsum(step.overlap.wire_seconds for step in its[begin:end]) for its in of_ranks]
        count = end - begin
        expected = {
            "step_seconds": math.fsum(times) / world.size / count,
            "samples_per_second": math.fsum(samples / time for time in times) / world.size,
            "tokens_per_second": math.fsum(7 * samples / time for time in times) / world.size,
            "communication_share": math.fsum(exposed) / math.fsum(times),
            "wire_seconds": math.fsum(wire) / world.size / count,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert 0 <= row["wire_hidden_share"] <= 1
        assert 2**20 < row["host_memory_peak_bytes"] < 2**40
        assert not {"gpu_memory_bytes", "gpu_utilisation", "loss_scale"} & row.keys()


def test_the_gradient_norm_is_that_of_the_whole_batch(world: World) -> None:
    """Before clipping. NumPy gives the gradient of the mean over all samples, at the parameters before the step."""
    schedule = warmup_cosine(0.1, warmup_steps=2, total_steps=9)

    def clipped(world: World) -> Parts:
        parts = build(world)
        model = parts.adapter
        return replace(parts, adapter=ArrayFunction(model._function, model.parameters(), SGD(schedule, clip_norm=1e-3)))

    class Before(Hook):
        def __init__(self) -> None:
            self.values: list[float] = []

        def before_step(self, trainer: Trainer) -> None:
            order = permuted(numpy.arange(13), 13, (0, trainer.step_number // 3))
            x = numpy.linspace(-1, 2, 13)[order[5 * (trainer.step_number % 3) :][:5]]
            w = trainer.adapter.parameters()["w"][0]
            self.values.append(abs(float((2 * (w * x - x * x) * x).mean())))

    for make in (build, clipped):
        before, writer = Before(), InMemory()
        record = Record([writer], steps=2, meters=[GradientNorm(), LearningRate()])
        Trainer(make, [StopAtStep(7), before, record]).run()
        if world.is_root:
            assert [row["step"] for row in writer.rows] == [2, 4, 6, 7]
            expected = [before.values[step - 1] for step in (2, 4, 6, 7)]
            assert [row["gradient_norm"] for row in writer.rows] == pytest.approx(expected, rel=1e-12)
            rates = [schedule(step) if make is clipped else 0.1 for step in (1, 3, 5, 6)]
            assert [row["learning_rate"] for row in writer.rows] == rates


def test_means_over_ranks_are_weighted(world: World) -> None:
    class Own(Meter):
        def read(self, trainer: Trainer) -> dict[str, Reading]:
            rank = trainer.world.rank
            found = {
                "mean": Reading(10.0 * rank, weight=rank + 1),
                "one": Reading(math.nan if rank else 3.0, weight=0 if rank else 2),
                "max": Reading(-float(rank), over_ranks="max"),
                "root": Reading(float(rank), over_ranks="root"),
                "none": Reading(1.0, weight=0),
            }
            return found | ({"last": Reading(4.0)} if rank == trainer.world.size - 1 else {})

    class After(Hook):
        def __init__(self) -> None:
            self.metrics: dict[str, float] = {}

        def after_step(self, trainer: Trainer, step: Step) -> None:
            self.metrics = trainer.metrics

    after = After()
    Trainer(build, [StopAtStep(1), Record([], meters=[Own()]), after]).run()
    weights = range(1, world.size + 1)
    mean = sum(10.0 * (weight - 1) * weight for weight in weights) / sum(weights)
    expected = {"mean": mean, "one": 3.0, "max": 0.0, "root": 0.0, "last": 4.0}
    assert world.allgather(after.metrics) == [pytest.approx(expected, rel=1e-15)] * world.size


def test_combine_does_not_depend_on_the_order_of_the_ranks() -> None:
    values = [(1e16, 1.0), (1.0, 3.0), (-1e16, 1.0), (0.1, 2.0)]
    forth = combine([{"a": Reading(*value)} for value in values])
    back = combine([{"a": Reading(*value)} for value in reversed(values)])
    assert forth == back == {"a": pytest.approx(3.2 / 7, rel=1e-15)}
    infinite = combine([{"a": Reading(math.inf)}, {"a": Reading(-math.inf)}])
    assert math.isnan(infinite["a"])
    assert combine([{}, {}]) == {}


def test_the_last_row_comes_whoever_ends_the_run(world: World) -> None:
    writer = InMemory()
    record = Record([writer], steps=3)
    Trainer(build, [Tell(float, every=2), StopWhen("m", at_least=4), record]).run()
    assert [row["step"] for row in writer.rows] == ([2, 3, 4] if world.is_root else [])
    writer = InMemory()
    meters = [Loss(), Throughput(), Communication(), Memory()]
    Trainer(build, [Record([writer], steps=1, meters=meters), StopWhen("loss", at_most=1e9)]).run()
    assert [row["step"] for row in writer.rows] == ([1] if world.is_root else [])


def test_what_is_not_there_is_said(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    writer = InMemory()
    Trainer(build, [StopAtStep(2), Record([writer], meters=[Loss(), GpuUtilisation()])]).run()
    on = f"{world.size} of {world.size} ranks" if world.size > 1 else "this rank"
    text = f"mpitrain: GpuUtilisation is not recorded on {on}. {world.name(0)}: it computes on the host\n"
    assert capfd.readouterr().err == (text if world.is_root else "")
    assert not world.is_root or writer.rows[0].keys() == {"step", "epoch", "samples", "seconds", "loss"}


def test_what_is_refused(world: World) -> None:
    for name in ("step", "loss"):
        hooks = [StopAtStep(2), Tell(float, name=name), Record([], steps=1, meters=[Loss()])]
        text = error_on_all(world, ConfigError, lambda hooks=hooks: Trainer(build, hooks).run())
        assert f"the metric '{name}' was reported" in text
    with pytest.raises(ConfigError, match="Record must come after Evaluation"):
        Trainer(build, [StopAtStep(1), Record([]), Evaluation(1, lambda trainer: {})]).run()
    for make in (lambda: Record([], steps=0), lambda: Throughput(tokens_per_sample=0)):
        with pytest.raises(ConfigError, match="at least 1"):
            make()


def test_rows_count_outer_steps(world: World) -> None:
    """In rounds of three steps. The last one ends the run, and the row of its last step has it."""

    def build_rounds(its: World) -> Parts:
        return replace(build(its), strategy=DiLoCo(3))

    writer = InMemory()
    Trainer(build_rounds, [StopAtStep(8), Record([writer], steps=2)]).run()
    rows = world.broadcast_object(writer.rows)
    assert [(row["step"], row["outer_steps"]) for row in rows] == [(2, 0), (4, 1), (6, 2), (8, 3)]
    writer = InMemory()
    Trainer(build, [StopAtStep(2), Record([writer], steps=2)]).run()
    assert all("outer_steps" not in row for row in world.broadcast_object(writer.rows))
