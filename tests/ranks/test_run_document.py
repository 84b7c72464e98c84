"""run.json: what a record says of its run, at the start, at the end, after an error and after a resume."""

from __future__ import annotations

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
from mpitrain.errors import ConfigError
from mpitrain.job.worlds import make_world
from mpitrain.launch.roster import launcher_pid
from mpitrain.training.run_document import RunDocument, read_document
from mpitrain.writers import Csv, JsonLines

from .test_hooks import build
from .test_rebuild import Rebuild


class Look(Hook):
    """Reads the document after some steps, on rank 0."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.json"
        self.seen: list[RunDocument] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if trainer.world.is_root:
            self.seen.append(read_document(self.path))


class Fail(Hook):
    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number == 5:
            raise ConfigError("on purpose\nwith a second line")


def hooks_of(directory: Path, *others: Hook) -> list[Hook]:
    return [StopAtStep(6), *others, Record([JsonLines(directory), Csv(directory)]), Checkpoint(directory / "saved", 1)]


def test_during_the_run_and_after_it(world: World, shared: Path) -> None:
    before = time.time()
    look = Look(shared)
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
        Trainer(build, hooks_of(shared, Fail())).run()
    failed = read_document(shared / "run.json") if world.is_root else None
    world.barrier()
    Trainer(build, hooks_of(shared)).run()
    if failed is not None:
        # All ranks fail at once, so rank 0 may hear of another one before its own hook raises.
        assert re.fullmatch(r"(rank [1-9] on \S+ failed: )?ConfigError: on purpose", failed.end), failed.end
        assert failed.after_step == 0
        resumed = read_document(shared / "run.json")
        assert (resumed.end, resumed.first_started) == ("done", failed.first_started)
        assert resumed.after_step in (3, 4)  # the failure may have interrupted the write of step 4
        assert resumed.started > failed.started


def test_an_error_that_the_caller_handles_is_not_of_the_run(world: World, shared: Path) -> None:
    try:
        raise ValueError("handled")
    except ValueError:
        Trainer(build, [StopAtStep(2), Record([JsonLines(shared)])]).run()
    assert not world.is_root or read_document(shared / "run.json").end == "done"


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


class Plain:
    """A writer of rows alone, as a user may have written it."""

    def open(self, after_step: int) -> None: ...

    def write(self, row: Any, events: Any = ()) -> None: ...

    def close(self) -> None: ...


def test_a_writer_need_not_describe(world: World) -> None:
    Trainer(build, [StopAtStep(2), Record([Plain()])]).run()
