"""Shared by the tests of restarts: a training with a fault, and its result without faults."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import pytest

from faults.dying import DYING
from faults.outcome import succeeded
from jobs import VENVS, Job, run_command

HERE = socket.gethostname()

# 20 steps with a checkpoint every 4. A test puts its fault into WRONG, which runs before every step.
SCRIPT = """
import os, pathlib, signal, sys, time
import numpy
import mpitrain as mt
import mpitrain.training.hooks.checkpoint as its

folder = pathlib.Path(sys.argv[1])
its._PATIENCE_SECONDS = float("inf")  # every save that is due is there, also on a slow disk
world = mt.init()
rank = world.rank
"""
SCRIPT += DYING
SCRIPT += """
def saved():  # what was to be saved until now is on the disk
    last = trainer.step_number // 4 * 4
    while last and not (folder / "checkpoints" / f"step-{last:08d}").exists():
        time.sleep(0.02)

def kill():
    saved()
    time.sleep(1)  # the launcher looks for new ranks twice a second
    os.kill(os.getpid(), signal.SIGKILL)

def wrong(step):
    WRONG

def regression(parameters, batch, on_gradient):
    wrong(trainer.step_number + 1)
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / len(x))
    return float((error**2).mean())

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, (random.standard_normal((60, 5)), random.standard_normal(60)), global_batch=12)
    adapter = mt.ArrayFunction(regression, {"w": numpy.zeros(5)}, mt.optim.SGD(0.01, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(), data)

BEFORE
trainer = mt.Trainer(build, [mt.StopAtStep(20), mt.Checkpoint(folder / "checkpoints", steps=4)])
trainer.run()
if world.is_root:
    numpy.save(folder / "w.npy", trainer.adapter.parameters()["w"])
"""


def train(
    folder: Path,
    wrong: str,
    *options: str,
    ranks: int = 2,
    before: str = "",
    vendor: str = "mpich",
    env: Mapping[str, str] | None = None,
    during: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Job:
    """Run the training with this fault, in at most three tries. `before` runs before the training."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.replace("BEFORE", before).replace("WRONG", wrong))
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", str(ranks), "--restarts", "2"]
    env = {"MPITRAIN_MEMORY_STEPS": "1000", **(env or {})}
    command += [*options, str(folder / "train.py"), str(folder)]
    return run_command(command, cwd=folder, env=env, during=during)


def tries(job: Job) -> list[str]:
    """What the supervisor prints about each try."""
    return re.findall(r"^mpitrain: (try .*)$", job.stderr, re.M)


def parameters(folder: Path) -> bytes:
    """The bits of the training's final parameters."""
    return numpy.load(folder / "w.npy").tobytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The parameters of a training of two ranks without faults."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = train(folder, "pass")
    succeeded(job)
    assert tries(job) == []
    return parameters(folder)


@pytest.fixture(scope="module")
def uninterrupted_three(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The parameters of a training of three ranks without faults."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    succeeded(train(folder, "pass", ranks=3))
    return parameters(folder)
