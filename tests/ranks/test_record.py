"""The record of a run: a row says what the steps did, over all ranks; its files, also across a resume; run.json."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import platform
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpi4py
import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    Checkpoint,
    DiLoCo,
    Evaluation,
    Hook,
    Parts,
    Record,
    Step,
    StopAtStep,
    StopWhen,
    Trainer,
    World,
)
from mpitrain.data.order import permuted
from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.job.worlds import make_world
from mpitrain.launch.processes import launcher_pid
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
from mpitrain.training.run_document import RunDocument, read_document
from mpitrain.writers import Csv, JsonLines

from .common import error_on_all
from .test_hooks import Tell, build
from .test_rebuild import Rebuild
from .trainings import Record as KeepSteps
from .trainings import ran


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
    text = f"mpitrain: GpuUtilisation is not recorded on {on}. {world.name(0)}: it computes on the CPU\n"
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


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The columns that do not depend on time.
SAME = ("step", "epoch", "samples", "loss", "learning_rate", "gradient_norm", "m")


def hooks_of(directory: Path, steps: int) -> list[Hook]:
    record = Record([JsonLines(directory), Csv(directory)], steps=4)
    return [StopAtStep(steps), Tell(float, every=5), record, Checkpoint(directory / "saved", 3)]


def test_a_resumed_run_has_the_rows_of_the_uninterrupted_one(world: World, shared: Path) -> None:
    """The run breaks off after step 11, continues from step 9, within the row of step 12. A torn line is cut away."""
    whole, resumed = shared / "whole", shared / "resumed"
    Trainer(build, hooks_of(whole, 15)).run()

    class Fail(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 11:
                raise ConfigError("on purpose")

    with pytest.raises(ConfigError, match="on purpose"):
        Trainer(build, [*hooks_of(resumed, 15), Fail()]).run()
    if world.is_root:
        assert [row["step"] for row in rows_of(resumed / "metrics.jsonl")] == [4, 5, 8, 10]
        for name in ("metrics.jsonl", "metrics.csv"):
            with (resumed / name).open("a") as file:
                file.write('{"step": 11, "ep')  # as a process that is killed in the middle of a line leaves it
    world.barrier()
    Trainer(build, hooks_of(resumed, 15)).run()
    if world.is_root:
        expected, found = rows_of(whole / "metrics.jsonl"), rows_of(resumed / "metrics.jsonl")
        assert [row["step"] for row in found] == [4, 5, 8, 10, 12, 15]
        select = [[{name: row.get(name) for name in SAME} for row in rows] for rows in (expected, found)]
        assert select[0] == select[1]
        assert [float(row["seconds"]) for row in found] == sorted(row["seconds"] for row in found)
        for directory in (whole, resumed):
            rows = [{k: v for k, v in row.items() if v != ""} for row in read_csv(directory / "metrics.csv")]
            lines = rows_of(directory / "metrics.jsonl")
            # Only these lines say where a run resumed: at step 9, or at 6 if the failure interrupted the write of 9.
            marked = [(line["step"], line.pop("resumed_after")) for line in lines if "resumed_after" in line]
            assert marked in ([[]] if directory == whole else [[(10, 9)], [(8, 6)]])
            assert [{k: float(v) for k, v in row.items()} for row in rows] == lines


def test_a_run_that_begins_anew_begins_its_record_anew(world: World, shared: Path) -> None:
    for _ in range(2):
        Trainer(build, [StopAtStep(4), Record([JsonLines(shared), Csv(shared)], steps=2)]).run()
        if world.is_root:
            assert [row["step"] for row in rows_of(shared / "metrics.jsonl")] == [2, 4]
            assert [row["step"] for row in read_csv(shared / "metrics.csv")] == ["2", "4"]
        world.barrier()


@pytest.mark.parametrize("steps", [6, 9])
def test_a_run_with_nothing_left_to_do_leaves_the_record_as_it_is(world: World, shared: Path, steps: int) -> None:
    """The last checkpoint is of the last row, or within the row of step 12."""
    Trainer(build, hooks_of(shared, steps)).run()
    before = (shared / "metrics.jsonl").read_bytes() if world.is_root else b""
    world.barrier()
    again = ran(build, hooks_of(shared, steps))
    assert again.step_number == steps
    assert not world.is_root or (shared / "metrics.jsonl").read_bytes() == before


def test_a_file_that_is_no_record(world: World, shared: Path) -> None:
    if world.is_root:
        (shared / "metrics.jsonl").write_text('{"step": 1}\nhello\n')
    world.barrier()
    hooks = [StopAtStep(2), Record([JsonLines(shared)])]
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2 is not a row of a record: .*; move the file away"):
        Trainer(build, hooks).run()
    assert not world.is_root or (shared / "metrics.jsonl").read_text() == '{"step": 1}\nhello\n'
    file = shared / "file"
    if world.is_root:
        file.write_text("")
    world.barrier()
    hooks = [StopAtStep(2), Record([Csv(file)])]
    assert "FileExistsError" in error_on_all(world, MpitrainError, lambda: Trainer(build, hooks).run())


class Look(Hook):
    """Reads the document after some steps, on rank 0."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.json"
        self.seen: list[RunDocument] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if trainer.world.is_root:
            self.seen.append(read_document(self.path))


class FailAtFive(Hook):
    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number == 5:
            raise ConfigError("on purpose\nwith a second line")


def documented(directory: Path, *others: Hook) -> list[Hook]:
    return [StopAtStep(6), *others, Record([JsonLines(directory), Csv(directory)]), Checkpoint(directory / "saved", 1)]


def test_during_the_run_and_after_it(world: World, shared: Path) -> None:
    before = time.time()
    look = Look(shared)
    try:
        raise ValueError("handled")
    except ValueError:  # it is not of the run
        Trainer(build, [StopAtStep(2), Record([JsonLines(shared)]), look]).run()
    after = time.time()
    if not world.is_root:
        return
    first, second = look.seen
    assert first == second
    of_hosts = {host: [rank for rank in range(world.size) if world.hosts[rank] == host] for host in world.hosts}
    assert (first.hosts, sum(map(len, first.hosts.values()))) == (of_hosts, world.size)
    assert (first.script, first.arguments, first.folder) == (sys.argv[0], sys.argv[1:], os.getcwd())  # noqa: PTH109
    assert (first.strategy, first.python, first.version) == ("Sync", platform.python_version(), 1)
    assert {name: first.packages[name] for name in ("numpy", "mpi4py")} == {
        "numpy": numpy.__version__,
        "mpi4py": mpi4py.__version__,
    }
    assert launcher_pid(first.process) == os.getpid()
    assert (first.ended, first.end, first.after_step) == (None, "", 0)
    assert before <= first.started == first.first_started <= after
    ended = read_document(look.path)
    assert (ended.end, first.started <= (ended.ended or 0) <= after) == ("done", True)
    assert dataclasses.replace(ended, ended=None, end="") == first
    assert json.loads(look.path.read_text())["hosts"] == of_hosts
    assert sorted(path.name for path in shared.iterdir()) == ["metrics.jsonl", "run.json"]


@pytest.mark.usefixtures("a_slow_disk_is_waited_for")
def test_an_error_and_a_resume(world: World, shared: Path) -> None:
    """The training keeps the time of its beginning; the job that continues has its own."""
    with pytest.raises(ConfigError, match="on purpose"):
        Trainer(build, documented(shared, FailAtFive())).run()
    failed = read_document(shared / "run.json") if world.is_root else None
    world.barrier()
    Trainer(build, documented(shared)).run()
    if failed is not None:
        # All ranks fail at once, so rank 0 may hear of another one before its own hook raises.
        assert re.fullmatch(r"(rank [1-9] on \S+ failed: )?ConfigError: on purpose", failed.end), failed.end
        assert failed.after_step == 0
        resumed = read_document(shared / "run.json")
        assert (resumed.end, resumed.first_started) == ("done", failed.first_started)
        assert resumed.after_step in (3, 4)  # the failure may have interrupted the write of step 4
        assert resumed.started > failed.started


def test_another_world_does_not_end_the_run(world: World, shared: Path) -> None:
    look = Look(shared)

    def new_world(old: World) -> World:
        return make_world(world.comm, world.config, old.generation + 1)

    hooks = [StopAtStep(4), Rebuild((2,), new_world), Record([JsonLines(shared)]), look]
    Trainer(build, hooks, new_world(world)).run()
    if world.is_root:
        assert [document.end for document in look.seen] == [""] * 4
        assert [document.after_step for document in look.seen] == [0, 1, 1, 1]
        assert len({document.first_started for document in look.seen}) == 1
        assert read_document(look.path).end == "done"
