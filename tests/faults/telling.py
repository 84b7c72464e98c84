"""Shared by the tests of `mpitrain tell`: a training until a file says so, and the same with a schedule."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from jobs import Job, run_command, run_job, until, without_restarts
from keeping import kept_id
from mpitrain.launch.roster import jobs

# Without more arguments, the training lasts until there is a file `end`. With STEP LAST, the learning rate halves after
# STEP, and LAST is the last step. The parameters have a part in the loss that depends on the tunable value.
SCRIPT = """
import json, os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
world = mt.init()
decay = mt.tunable("decay", 0.25)
is_loud, label = mt.tunable("loud", False), mt.tunable("label", "first")
steps = []
halves, last = (int(word) for word in sys.argv[2:]) if len(sys.argv) > 2 else (0, 0)

def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] - y
    gradient = 2 * x.T @ error / max(1, len(x)) + decay.value * parameters["w"]
    on_gradient("w", gradient if len(x) else numpy.zeros(5))
    return float((error**2).mean()) if len(x) else 0.0

def schedule(step):
    return 0.01 * (0.5 if last and step >= halves else 1.0)

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, (random.standard_normal((61, 5)), random.standard_normal(61)), global_batch=12)
    adapter = mt.ArrayFunction(regression, {"w": numpy.zeros(5)}, mt.optim.SGD(schedule, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(), data)

class Steps(mt.Hook):
    ends_run = True

    def after_step(self, trainer, step):
        steps.append((step.number, step.loss, step.learning_rate, decay.value))
        if last:
            is_over = step.number == last
        else:
            time.sleep(0.05)
            WRONG
            is_over = trainer.world.broadcast_object((folder / "end").exists())
        if is_over:
            trainer.last_step = step.number

(folder / f"pid.{world.rank}").write_text(str(os.getpid()))
hooks = [Steps(), mt.Record([mt.writers.JsonLines(folder / "record")], steps=1)]
mt.Trainer(build, [*hooks, *HOOKS], WORLD).run()
if world.is_root:
    (folder / "steps.json").write_text(json.dumps(steps))
"""
CHECKPOINT = '[mt.Checkpoint(folder / "checkpoints", steps=1000)]'


def script(wrong: str = "pass", hooks: str = "[]", world: str = "world") -> str:
    return SCRIPT.replace("WRONG", wrong).replace("*HOOKS", f"*{hooks}").replace("WORLD", world)


def train(
    folder: Path,
    during: Callable[[Teller], None],
    *options: str,
    ranks: int = 2,
    source: str = "",
    python: Path | str = sys.executable,
) -> Job:
    """Run the training under `mpitrain run`; `during` tells it something."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(source or script())
    command = [str(python), "-m", "mpitrain", "run", "--hosts", "localhost", "-n", str(ranks)]
    command += without_restarts(options)

    def told(process: subprocess.Popen[str]) -> None:
        during(Teller(folder, process.pid))

    return run_command([*command, str(folder / "train.py"), str(folder)], cwd=folder, during=told)


def reckoned(folder: Path, halves: int, last: int, ranks: int) -> list[list[Any]]:
    """The steps of a training without a launcher whose schedule halves the learning rate after this step."""
    (folder / "reckoned").mkdir()
    job = run_job(ranks, script(), str(folder / "reckoned"), str(halves), str(last))
    assert job.code == 0, job.output
    return steps_of(folder / "reckoned")


def steps_of(folder: Path) -> list[list[Any]]:
    """Number, loss, learning rate and tunable value of each step of the last attempt."""
    steps: list[list[Any]] = json.loads((folder / "steps.json").read_text())
    return steps


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record" / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [event for row in rows_of(folder) for event in row.get("events", [])]


class Teller:
    """Tells one job something, from processes of its own."""

    def __init__(self, folder: Path, launcher: int) -> None:
        self.folder, self.launcher = folder, launcher

    def job(self) -> str:
        """The id of the present try, whose ranks train."""
        tokens: list[str] = []

        def is_there() -> bool:
            mine = [job for job in jobs() if job["launcher"].split()[1:2] == [str(self.launcher)]]
            records = {job["id"]: [view["record"] for view in job["ranks"]] for job in mine}
            tokens[:] = [
                name for name, of_job in records.items() if any(r["facts"].get("step") or r["steering"] for r in of_job)
            ]
            return bool(tokens)

        until(is_there, "no rank of the job trains")
        return tokens[0]

    def tell(self, *words: str) -> Job:
        return run_command([sys.executable, "-m", "mpitrain", "tell", "--hosts", "localhost", self.job(), *words])

    def applied(self, *words: str) -> int:
        """Tell it, and return the step after which it was applied."""
        told = self.tell(*words)
        assert told.code == 0, told.output
        step = re.search(r"applied after step (\d+)$", told.stdout, re.M)
        assert step is not None, told.output
        return int(step[1])

    def refused(self, why: str, *words: str) -> None:
        told = self.tell(*words)
        assert told.code in (1, 2), told.output
        assert why in told.stderr, told.output

    def wait_for_step(self, step: int) -> None:
        def is_made() -> bool:
            path = self.folder / "record" / "metrics.jsonl"
            return path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines())

        until(is_made, f"step {step} was not made")

    def kill_rank(self, rank: int) -> None:
        os.kill(int((self.folder / f"pid.{rank}").read_text()), signal.SIGKILL)

    def resume(self, during: Callable[[Teller], None]) -> Job:
        """Another launcher continues with the job, whose launcher is lost; `during` tells that one something."""
        command = [sys.executable, "-m", "mpitrain", "resume", kept_id(self.folder)]
        return run_command(command, during=lambda process: during(Teller(self.folder, process.pid)))

    def end(self) -> None:
        (self.folder / "end").touch()


def same(bits: list[list[Any]], expected: list[list[Any]]) -> None:
    """All numbers are the same, bit for bit; both were written by `json`, which keeps every bit."""
    assert [row[0] for row in bits] == [row[0] for row in expected]
    numpy.testing.assert_array_equal(numpy.array(bits), numpy.array(expected))
