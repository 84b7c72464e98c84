"""Shared by the tests of restarts and of in-memory checkpoints: a training with a fault, and checks of its result."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy

from faults.failing import DYING
from faults.outcome import succeeded
from jobs import VENVS, Job, run_command

STEPS = 20
EVERY_4 = "[mt.Checkpoint(folder / 'checkpoints', steps=4)]"

# A regression with momentum. A test puts its fault into WRONG, which runs in every step, or into one of the other
# places.
SCRIPT = """
import json, os, pathlib, signal, sys, time
import numpy
import mpitrain as mt
import mpitrain.training.hooks.checkpoint as its

folder = pathlib.Path(sys.argv[1])
its._PATIENCE_SECONDS = float("inf")  # every save that is due is there, also on a slow disk
FIRST
world = mt.init()
rank = world.rank
steps = []
"""
SCRIPT += DYING
SCRIPT += """
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

def kill(every=4):  # when what was to be saved until now is on the disk
    if (folder / "checkpoints").exists() and trainer.step_number >= every:
        wait_for(f"checkpoints/step-{trainer.step_number // every * every:08d}")
    time.sleep(1)  # the launcher looks for new ranks twice a second
    die()

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


def source(
    wrong: str, first: str = "", before: str = "", after: str = "", hooks: str = "[]", dtype: str = "float64"
) -> str:
    text = SCRIPT.replace("DTYPE", dtype).replace("*HOOKS", f"*{hooks}")
    for place, code in (("FIRST", first), ("BEFORE", before), ("AFTER", after), ("WRONG", wrong)):
        text = text.replace(place, code)
    return text


def train(
    folder: Path,
    wrong: str = "pass",
    *options: str,
    ranks: int = 2,
    vendor: str = "mpich",
    every: int | None = 1,
    codec: str = "none",
    launcher: Sequence[str] = ("-m", "mpitrain"),
    env: Mapping[str, str] | None = None,
    during: Callable[[subprocess.Popen[str]], None] | None = None,
    **places: str,
) -> Job:
    """Run the training, in at most three tries. Its state is copied to memory every `every` steps.

    `launcher` are the arguments of the Python that runs `mpitrain`.
    """
    folder.mkdir(exist_ok=True)
    text = source(wrong, dtype="float64" if codec == "none" else "float32", **places)
    (folder / "train.py").write_text(text)
    command = [str(VENVS[vendor] / "bin/python"), *launcher, "run", "-n", str(ranks), "--max-restarts", "2"]
    settings = {"MPITRAIN_COMPRESSION": codec} | ({} if every is None else {"MPITRAIN_MEMORY_STEPS": str(every)})
    command += [*options, str(folder / "train.py"), str(folder)]
    return run_command(command, cwd=folder, env={**settings, **(env or {})}, during=during)


def tries(job: Job) -> list[str]:
    """What the supervisor prints about each attempt."""
    return re.findall(r"^mpitrain: (attempt .*)$", job.stderr, re.M)


def resumed(job: Job) -> list[int]:
    """The steps from which tries resumed from memory."""
    return [int(step) for step in re.findall(r"resumed from memory at step (\d+)$", job.stdout, re.M)]


def not_from_memory(job: Job) -> list[str]:
    """The messages of the attempts that did not resume from memory."""
    return re.findall(r"mpitrain: memory is not used: (.*)$", job.stdout, re.M)


def result(folder: Path) -> tuple[bytes, dict[int, float]]:
    """The bits of the training's final parameters and of the loss of each step of its last attempt."""
    return numpy.load(folder / "w.npy").tobytes(), dict(json.loads((folder / "steps.json").read_text()))


def went_on(job: Job, folder: Path, after: list[int], expected: tuple[bytes, dict[int, float]]) -> None:
    """Tries resumed from memory after these steps. The training ended with the bits of an undisturbed training."""
    succeeded(job)
    assert resumed(job) == after, job.output
    parameters, losses = result(folder)
    assert parameters == expected[0]
    assert losses == {step: loss for step, loss in expected[1].items() if step > after[-1]}
