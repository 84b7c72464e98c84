"""The files of a record: each row is written once, also across a resume, and a new run begins them anew."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain import Checkpoint, Hook, Record, Step, StopAtStep, Trainer, World
from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.writers import Csv, JsonLines

from .common import error_on_all
from .test_hooks import Tell, build


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


def test_a_resumed_run_with_nothing_left_to_do(world: World, shared: Path) -> None:
    """The last checkpoint of the run is of step 9, within the row of step 12."""
    Trainer(build, [*hooks_of(shared, 9)]).run()
    before = (shared / "metrics.jsonl").read_text() if world.is_root else ""
    again = Trainer(build, hooks_of(shared, 9))
    again.run()
    assert again.step_number == 9
    assert not world.is_root or (shared / "metrics.jsonl").read_text() == before


def test_a_run_that_begins_anew_begins_its_record_anew(world: World, shared: Path) -> None:
    for _ in range(2):
        Trainer(build, [StopAtStep(4), Record([JsonLines(shared), Csv(shared)], steps=2)]).run()
        if world.is_root:
            assert [row["step"] for row in rows_of(shared / "metrics.jsonl")] == [2, 4]
            assert [row["step"] for row in read_csv(shared / "metrics.csv")] == ["2", "4"]
        world.barrier()


def test_a_run_with_nothing_left_to_do_leaves_the_record_as_it_is(world: World, shared: Path) -> None:
    Trainer(build, hooks_of(shared, 6)).run()
    before = (shared / "metrics.jsonl").read_bytes() if world.is_root else b""
    world.barrier()
    Trainer(build, hooks_of(shared, 6)).run()
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
