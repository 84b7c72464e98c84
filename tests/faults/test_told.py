"""SIGTERM to a rank, with which its host leaves the job or the job ends; and other wishes to change the hosts."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from faults.failing import HERE, launched
from faults.outcome import succeeded
from jobs import HANG_SECONDS, Job, until
from mpitrain.launch.control import ask
from mpitrain.launch.kept import DIES, PREPARES, STAYS, Kept
from mpitrain.launch.processes import launcher_name

# A test adds its hooks at HOOKS. Without `endless`, the training makes 60 steps.
SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
import multiprocessing
import mpitrain as mt
from mpitrain.cli.new_project.train import build

folder = pathlib.Path(sys.argv[1])
world = mt.init()

class Note(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.02)
        if step.number == 3:
            (folder / f"rank-{world.rank}.part").write_text(str(os.getpid()))
            (folder / f"rank-{world.rank}.part").rename(folder / f"rank-{world.rank}")

FIRST
hooks = [mt.StopAtStep(10000 if (folder / "endless").exists() else 60), Note(), *HOOKS]
mt.Trainer(build, hooks).run()
world.print("done")
"""


def train(
    folder: Path,
    during: Callable[[subprocess.Popen[str]], None],
    *options: str,
    hooks: str = "[]",
    first: str = "",
    vendor: str = "mpich",
) -> Job:
    source = SCRIPT.replace("*HOOKS", f"*{hooks}").replace("FIRST", first)
    how = {"words": (str(folder),), "vendor": vendor, "cwd": folder, "during": during}
    return launched(folder, source, 3, *options, **how)


def process_of(process: subprocess.Popen[str], folder: Path, rank: int) -> int:
    """Wait for a rank that has made three steps. Return its process."""
    path = folder / f"rank-{rank}"
    until(lambda: path.exists() or process.poll() is not None)
    return int(path.read_text())


def tell(folder: Path, rank: int) -> Callable[[subprocess.Popen[str]], None]:
    def during(process: subprocess.Popen[str]) -> None:
        (folder / "endless").touch()
        pid = process_of(process, folder, rank)
        time.sleep(1.0)  # the launcher hears of a rank once a second
        os.kill(pid, signal.SIGTERM)

    return during


def test_the_last_host_saves_and_ends(tmp_path: Path, vendor: str) -> None:
    hooks = "[mt.Checkpoint(folder / 'checkpoints', steps=100000)]"
    job = train(tmp_path, tell(tmp_path, 1), "--max-restarts", "2", hooks=hooks, vendor=vendor)
    assert job.code == 128 + signal.SIGTERM, job.output
    assert job.left == []
    told = re.search(
        rf"mpitrain: SIGTERM told rank 1 to end on {HERE}: the job has ended after step (\d+)\n", job.stderr
    )
    assert told, job.output
    path = tmp_path / "checkpoints" / f"step-{int(told[1]):08d}"
    assert path.exists()
    assert f"{path} is saved; the same command continues from there" in job.stdout
    assert "failed" not in job.stderr
    # The same command continues.
    (tmp_path / "endless").unlink()
    source = (tmp_path / "script.py").read_text().replace("else 60", f"else {int(told[1]) + 5}")
    again = launched(tmp_path, source, 3, "--max-restarts", "2", words=(str(tmp_path),), vendor=vendor, cwd=tmp_path)
    succeeded(again)
    assert f"at step {told[1]}\n" in again.stdout


@pytest.mark.nightly
def test_without_a_checkpoint(tmp_path: Path) -> None:
    job = train(tmp_path, tell(tmp_path, 0), "--max-restarts", "2")
    assert job.code == 128 + signal.SIGTERM, job.output
    assert "mpitrain: nothing saves step" in job.stdout


@pytest.mark.nightly
def test_without_restarts_it_is_a_failure(tmp_path: Path, vendor: str) -> None:
    job = train(tmp_path, tell(tmp_path, 1), "--max-restarts", "0", vendor=vendor)
    assert job.code == 128 + signal.SIGTERM, job.output
    # MPICH's mpiexec prints how one rank ended. This may be another rank, which mpiexec has ended itself.
    assert re.search(rf"mpitrain: rank 1 on {HERE} (was killed by signal 15|ended without a message)", job.stderr), (
        job.output
    )
    assert "told" not in job.stderr


@pytest.mark.nightly
@pytest.mark.nightly
def test_helpers_of_a_rank_end_by_sigterm(tmp_path: Path) -> None:
    first = (
        "helper = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,))\n"
        "helper.start(); time.sleep(0.5); helper.terminate(); helper.join(); assert helper.exitcode == -15\n"
        "other = subprocess.Popen(['sleep', '1000']); other.terminate(); assert other.wait() == -15"
    )
    job = train(tmp_path, lambda _: None, "--max-restarts", "2", first=first)
    succeeded(job)
    assert "told" not in job.stderr


@pytest.mark.parametrize("is_answered", [True, False])
def test_another_change_that_is_dropped(is_answered: bool) -> None:
    """The rank has heard an answer that was not meant for it. It waits again, here for ever or not at all."""
    rank = """
import sys
from mpitrain.job import job
from mpitrain.context import JobContext

job._ANSWER_SECONDS = float(sys.argv[2])
job._wait(JobContext(keeper=sys.argv[1], job="try"))
"""
    name = f"mpitrain-test-{secrets.token_hex(8)}"
    seconds = "1e9" if is_answered else "0"
    with closing(Kept(name)) as kept:
        kept.of, kept.wish = "try", PREPARES
        process = subprocess.Popen([sys.executable, "-c", rank, name, seconds])
        try:

            def answer() -> bool:
                """True if the rank has heard the current wish, and is still there."""
                for _ in range(2):  # the rank connects and asks; then it asks, and asks again or ends
                    assert select.select([kept], [], [], HANG_SECONDS)[0]
                    kept.look()
                return bool(kept._lines)

            assert answer()
            kept.wish = STAYS
            assert answer() == is_answered
            if is_answered:
                kept.wish = DIES
            until(lambda: kept.look() or process.poll() is not None)
            assert process.wait() == -signal.SIGTERM
        finally:
            process.kill()
            process.wait()


# -- wishes to change the hosts: an impossible one is refused at once ------------------------------------------------

# Each part lasts until its file exists.
PARTS = """
import pathlib, sys, time
import mpitrain as mt
from mpitrain.cli.new_project.train import build

folder = pathlib.Path(sys.argv[1])
world = mt.init()

def is_over(part):
    time.sleep(0.02)
    return world.broadcast_object((folder / part).exists())

class Until(mt.Hook):
    ends_run = True

    def after_step(self, trainer, step):
        if is_over(name):
            trainer.last_step = step.number

for name in "loop", "first", "second", "rest":
    kept = mt.keep(step=0) if name == KEPT else None
    if kept is None and name in ("first", "second"):
        mt.Trainer(build, [Until()]).run()
    else:
        while not is_over(name):
            if kept:
                kept.update(step=kept["step"] + 1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kept", ["first", "none"])
def test_only_the_first_run_can_be_left(tmp_path: Path, kept: str) -> None:
    """A run is that of a Trainer, or a loop with mt.keep."""
    none = "a loop with mt.keep, copies its state to memory, and none does so now"
    alone = "no host would be left, and the job needs one"
    refused = {"loop": none, "first": alone, "second": "it is in run 2 of its script, and the hosts", "rest": none}

    def during(process: subprocess.Popen[str]) -> None:
        for part, why in refused.items():

            def is_refused(why: str = why) -> bool:
                told = ask(launcher_name(process.pid), {"leave": [HERE]})
                return why in told.get("refused", "")

            until(is_refused, part)
            (tmp_path / part).touch()

    source = PARTS.replace("KEPT", repr(kept))
    job = launched(tmp_path, source, 2, "--max-restarts", "1", words=(str(tmp_path),), cwd=tmp_path, during=during)
    succeeded(job)
    assert "could change" not in job.stderr
