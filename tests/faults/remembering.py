"""Shared by the tests of copies in memory: a training with a fault, and checks of its result."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy

from faults.dying import DYING
from faults.outcome import succeeded
from jobs import VENVS, Job, run_command

HERE = socket.gethostname()
STEPS = 20

# A regression with momentum. A test puts its fault into WRONG, which runs before every step, or into one of the other
# places.
SCRIPT = """
import json, os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
FIRST
world = mt.init()
rank = world.rank
steps = []
"""
SCRIPT += DYING
SCRIPT += """
def regression(parameters, batch, on_gradient):
    step = trainer.step_number + 1
    WRONG
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", (2 * x.T @ error / max(1, len(x))).astype(parameters["w"].dtype))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, (random.standard_normal((61, 5)), random.standard_normal(61)), global_batch=12)
    zeros = {"w": numpy.zeros(5, "DTYPE")}
    return mt.Parts(mt.ArrayFunction(regression, zeros, mt.optim.SGD(0.01, momentum=0.9)), mt.Sync(), data)

class Steps(mt.Hook):
    def after_step(self, trainer, step):
        steps.append((step.number, step.loss))

BEFORE
trainer = mt.Trainer(build, [mt.StopAtStep(20), Steps(), *HOOKS])
trainer.run()
AFTER
if world.is_root:
    numpy.save(folder / "w.npy", trainer.adapter.parameters()["w"])
    (folder / "steps.json").write_text(json.dumps(steps))
"""


def train(
    folder: Path,
    wrong: str = "pass",
    *options: str,
    ranks: int = 2,
    first: str = "",
    before: str = "",
    after: str = "",
    hooks: str = "[]",
    vendor: str = "mpich",
    every: int | None = 1,
    codec: str = "none",
    launcher: Sequence[str] = ("-m", "mpitrain"),
    during: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Job:
    """Run the training, in at most three tries. Its state is copied to memory every `every` steps.

    `launcher` are the arguments of the Python that runs `mpitrain`.
    """
    folder.mkdir(exist_ok=True)
    source = (
        SCRIPT.replace("FIRST", first).replace("BEFORE", before).replace("AFTER", after).replace("*HOOKS", f"*{hooks}")
    )
    source = source.replace("DTYPE", "float64" if codec == "none" else "float32")
    (folder / "train.py").write_text(source.replace("WRONG", wrong))
    command = [str(VENVS[vendor] / "bin/python"), *launcher, "run", "-n", str(ranks), "--restarts", "2"]
    env = {"MPITRAIN_COMPRESSION": codec} | ({} if every is None else {"MPITRAIN_MEMORY_STEPS": str(every)})
    command += [*options, str(folder / "train.py"), str(folder)]
    return run_command(command, cwd=folder, env=env, during=during)


def resumed(job: Job) -> list[int]:
    """The steps from which tries resumed from memory."""
    return [int(step) for step in re.findall(r"resumed from memory at step (\d+)$", job.stdout, re.M)]


def not_from_memory(job: Job) -> list[str]:
    """The messages of the tries that did not resume from memory."""
    return re.findall(r"mpitrain: memory is not used: (.*)$", job.stdout, re.M)


def result(folder: Path) -> tuple[bytes, dict[int, float]]:
    """The bits of the training's final parameters and of the loss of each step of its last try."""
    return numpy.load(folder / "w.npy").tobytes(), dict(json.loads((folder / "steps.json").read_text()))


def went_on(job: Job, folder: Path, after: list[int], expected: tuple[bytes, dict[int, float]]) -> None:
    """Tries resumed from memory after these steps. The training ended with the bits of an undisturbed training."""
    succeeded(job)
    assert resumed(job) == after, job.output
    parameters, losses = result(folder)
    assert parameters == expected[0]
    assert losses == {step: loss for step, loss in expected[1].items() if step > after[-1]}
