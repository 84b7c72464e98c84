"""The files of a record: each row is written once, also across a resume; and run.json, which says what the run was."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import mpi4py
import numpy
import pytest

from mpitrain import Checkpoint, Hook, Record, Step, StopAtStep, Trainer, World
from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.job.worlds import make_world
from mpitrain.launch.roster import launcher_pid
from mpitrain.training.run_document import RunDocument, read_document
from mpitrain.writers import Csv, JsonLines

from .common import error_on_all
from .test_hooks import Tell, build
from .test_rebuild import Rebuild


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
    """The run breaks off after step 11, and goes on from step 9, within the row of step 12. A torn line is cut away."""
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
    again = Trainer(build, hooks_of(shared, steps))
    again.run()
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
    """The training keeps the time of its beginning; the job that goes on has its own."""
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
