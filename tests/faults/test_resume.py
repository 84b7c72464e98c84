"""`mpitrain run --resume`: the launcher of a training is killed, and another one goes on, with the same bits."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from faults.outcome import succeeded
from jobs import VENVS, Job, clean_environment, run_command, until

HERE = socket.gethostname()
STEPS = 20

# A regression with momentum. Rank 0 tells each step, and waits for the file `go` in the steps of the file `halts`.
SCRIPT = """
import json, os, pathlib, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
world = mt.init()
steps = []

def regression(parameters, batch, on_gradient):
    step = trainer.step_number + 1
    halts = json.loads((folder / "halts").read_text())
    if world.rank == 0 and step in halts:
        (folder / f"in-{step}").touch()
        while step in json.loads((folder / "halts").read_text()):
            time.sleep(0.01)
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.ArrayData(world, (random.standard_normal((61, 5)), random.standard_normal(61)), global_batch=12)
    zeros = {"w": numpy.zeros(5)}
    return mt.Parts(mt.ArrayFunction(regression, zeros, mt.Sgd(0.01, momentum=0.9)), mt.Sync(), data)

class Steps(mt.Hook):
    def after_step(self, trainer, step):
        steps.append((step.number, step.loss))

(folder / "begun").open("a").write("x")
trainer = mt.Trainer(build, [mt.StopAtStep(20), Steps(), mt.Record([mt.JsonLines(folder)], steps=1)])
trainer.run()
if world.is_root:
    numpy.save(folder / "w.npy", trainer.adapter.parameters()["w"])
    (folder / "steps.json").write_text(json.dumps(steps))
    print("the variable is", os.environ.get("OF_THE_USER"), "in", os.getcwd())
"""


def mpitrain(*arguments: str, vendor: str = "mpich", cwd: Path = Path("/")) -> Job:
    """The command, in another folder and with another environment than the job."""
    return run_command([str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", *arguments], cwd=cwd)


def train(
    folder: Path,
    halts: list[int],
    during: Callable[[subprocess.Popen[str]], None] | None = None,
    *options: str,
    vendor: str = "mpich",
) -> Job:
    """Run the training; it stands still in these steps. Its state is copied to memory after every step."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    halt(folder, *halts)
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", "--restarts", "2", *options]
    env = {"MPITRAIN_MEMORY_STEPS": "1", "OF_THE_USER": "kept"}
    return run_command([*command, "train.py", str(folder)], cwd=folder, env=env, during=during)


def halt(folder: Path, *steps: int) -> None:
    """From now on, the training stands still in these steps."""
    new = folder / "halts.new"
    new.write_text(json.dumps(steps))
    new.replace(folder / "halts")


def kept_job(folder: Path) -> str:
    """The id of the job in this folder, when `mpitrain ps` lists it as kept."""
    ids: list[str] = []

    def is_kept() -> bool:
        listed = mpitrain("ps", "--hosts", "localhost")
        assert listed.code == 0, listed.output
        ids[:] = re.findall(rf"kept until \d\d:\d\d:\d\d: mpitrain run --resume (\w{{8}}) .*{folder}$", listed.stdout, re.M)
        return bool(ids)

    until(is_kept)
    return ids[0]


def result(folder: Path) -> tuple[bytes, dict[int, float]]:
    """The bits of the training's final parameters and of the loss of each step of its last try."""
    return numpy.load(folder / "w.npy").tobytes(), dict(json.loads((folder / "steps.json").read_text()))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[int, float]]:
    """The result of a training without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = train(folder, [])
    succeeded(job)
    return result(folder)


def went_on(job: Job, folder: Path, after: int, expected: tuple[bytes, dict[int, float]]) -> None:
    """The training resumed from memory after this step, and ended with the bits of an undisturbed one."""
    succeeded(job)
    assert re.findall(r"resumed from memory at step (\d+)$", job.stdout, re.M) == [str(after)], job.output
    parameters, losses = result(folder)
    assert parameters == expected[0]
    assert losses == {step: loss for step, loss in expected[1].items() if step > after}


def test_a_killed_launcher(tmp_path: Path, undisturbed: tuple[bytes, dict[int, float]]) -> None:
    """It is killed twice. Any id of the job will do. Nothing of the job is left."""
    first = random.randint(2, 9)
    print(f"killed in step {first}")
    jobs: list[Job] = []
    ids: list[str] = []

    def kill_again(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "in-14").exists)
        process.kill()

    def during(process: subprocess.Popen[str]) -> None:
        until((tmp_path / f"in-{first}").exists)
        process.kill()
        ids.append(kept_job(tmp_path))
        halt(tmp_path, 14)
        command = [sys.executable, "-m", "mpitrain", "run", "--resume", ids[0]]
        jobs.append(resume_and_kill(command, kill_again))
        ids.append(kept_job(tmp_path))
        halt(tmp_path)
        jobs.append(mpitrain("run", "--resume", ids[0]))
        jobs.append(mpitrain("run", "--resume", ids[1]))

    killed = train(tmp_path, [first], during)
    assert killed.code == -signal.SIGKILL
    assert killed.left == []
    job, other = ids
    assert len(set(ids)) == 2
    line = (
        rf"mpitrain: job {job} has lost its launcher; its state is kept in memory until \d\d:\d\d:\d\d. To go on: "
        rf"`mpitrain run --resume {job}`. To drop it: `mpitrain kill {job}`\n"
    )
    assert re.fullmatch(line, killed.stderr), killed.output
    again, last, too_late = jobs
    assert again.code == -signal.SIGKILL
    assert re.fullmatch(
        f"mpitrain: going on with job {job} from what is kept on {HERE}\n" + line.replace(job, other), again.stderr
    ), again.output
    went_on(last, tmp_path, 13, undisturbed)
    assert f"the variable is kept in {tmp_path}\n" in last.stdout
    assert too_late.code == 1
    assert f"nothing is kept of a job {other} of yours on {HERE}." in too_late.stderr
    assert "start its command again: it goes on from its newest checkpoint" in too_late.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [event for row in rows for event in row.get("events", [])]
    assert [(event["after_step"], event["source"]) for event in events] == [(first - 1, "memory"), (13, "memory")]
    assert [event["text"] for event in events] == [f"the launcher on {HERE} was lost"] * 2


def resume_and_kill(command: list[str], kill: Callable[[subprocess.Popen[str]], None]) -> Job:
    """Like run_command, but the keeper of the job, which has the environment of this command, may be left."""
    with subprocess.Popen(
        command,
        cwd="/",
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        kill(process)
        stdout, stderr = process.communicate(timeout=300)
    return Job(process.returncode, stdout, stderr, [])
