"""`mt.keep`: a killed loop of one's own goes on from memory, with the same bits as an undisturbed one."""

from __future__ import annotations

import random
import re
import signal
import socket
from pathlib import Path

import numpy
import pytest

from faults.dying import DYING
from faults.outcome import failed, succeeded
from jobs import VENVS, Job, run_command

HERE = socket.gethostname()
EVERY = 3  # steps from copy to copy

# A regression with momentum over 3 epochs of 7 batches, the last of one sample. `used` counts how often each sample was
# used, on all ranks together.
SCRIPT = """
import os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
"""
SCRIPT += DYING
SCRIPT += """
world = mt.init()
rank = world.rank
random = numpy.random.default_rng(0)
x, y = random.standard_normal((61, 5)), random.standard_normal(61)
batches = [(x[i:i + 10], y[i:i + 10], numpy.arange(61)[i:i + 10]) for i in range(0, 61, 10)] * 3
kept = mt.keep(w=numpy.zeros(5), optimizer={"velocity": numpy.zeros(5), "rate": 0.01}, used=numpy.zeros(61), step=0)
for bx, by, numbers in world.shard(batches, start=kept["step"]):
    step = kept["step"] + 1
    WRONG
    mean = world.mean(2 * bx.T @ (bx @ kept["w"] - by) / max(1, len(bx)), weight=len(bx))
    velocity = 0.9 * kept["optimizer"]["velocity"] + mean
    used = kept["used"] + world.sum(numpy.bincount(numbers, minlength=61))
    optimizer = {"velocity": velocity, "rate": 0.01}
    kept.update(w=kept["w"] - 0.01 * velocity, optimizer=optimizer, used=used, step=step)
if world.is_root:
    numpy.save(folder / "w.npy", kept["w"])
    numpy.save(folder / "used.npy", kept["used"])
"""


def train(
    folder: Path, wrong: str = "pass", ranks: int = 2, vendor: str = "mpich", tries: int = 3, **replaced: str
) -> Job:
    folder.mkdir(exist_ok=True)
    source = SCRIPT.replace("WRONG", wrong)
    for old, new in replaced.items():
        source = source.replace(old, new)
    (folder / "train.py").write_text(source)
    command = [
        str(VENVS[vendor] / "bin/python"),
        "-m",
        "mpitrain",
        "run",
        "-n",
        str(ranks),
        "--restarts",
        str(tries - 1),
    ]
    env = {"MPITRAIN_MEMORY_STEPS": str(EVERY)}
    return run_command([*command, str(folder / "train.py"), str(folder)], cwd=folder, env=env)


def resumed(job: Job) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from memory at step (\d+)$", job.stdout, re.M)]


@pytest.mark.parametrize("vendor", ["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)], indirect=True)
def test_a_killed_loop(tmp_path: Path, vendor: str) -> None:
    whole = train(tmp_path / "whole", ranks=3, vendor=vendor)
    succeeded(whole)
    assert not re.search("resumed|memory|failed", whole.output)  # a line about a wait on this machine may be there
    first, second = sorted(random.sample(range(EVERY + 1, 21), 2))
    wrong = f"if (rank, step) in ((2, {first}), (0, {second})) and once(f'killed-{{step}}'): die()"
    job = train(tmp_path / "killed", wrong, ranks=3, vendor=vendor)
    succeeded(job)
    assert resumed(job) == [(step - 1) // EVERY * EVERY for step in (first, second)], job.output
    assert re.search(rf"try 1 of 3 failed at step {first}: rank 2 on {HERE} ", job.stderr)
    w, expected = (numpy.load(tmp_path / run / "w.npy").tobytes() for run in ("killed", "whole"))
    assert w == expected
    assert numpy.load(tmp_path / "killed" / "used.npy").tolist() == [3.0] * 61  # each sample once in an epoch


def test_before_the_first_copy(tmp_path: Path) -> None:
    """The loop has nothing to go on from, and a line says so."""
    job = train(tmp_path, "if rank == 1 and step == 2 and once('killed'): die()")
    succeeded(job)
    why = "no host that takes part has a whole copy. The loop begins with what keep() was given"
    assert f"mpitrain: memory is not used: {why}\n" in job.stdout
    assert numpy.load(tmp_path / "used.npy").tolist() == [3.0] * 61


def test_a_state_of_another_shape(tmp_path: Path) -> None:
    size = "4 if world.broadcast_object((folder / 'killed').exists()) else 5"
    wrong = "if rank == 1 and step == 8 and once('killed'): die()"
    job = train(tmp_path, wrong, tries=2, **{"keep(w=numpy.zeros(5)": f"keep(w=numpy.zeros({size})"})
    failed(
        job, "CheckpointError: rank 0 on ", "w is float64 (5,) in the copy in memory, and was float64 (4,) in keep()"
    )


def test_a_script_that_keeps_something_else(tmp_path: Path) -> None:
    other = "**({'extra': 1} if world.broadcast_object((folder / 'killed').exists()) else {})"
    wrong = "if rank == 1 and step == 8 and once('killed'): die()"
    job = train(tmp_path, wrong, tries=2, **{"step=0)": f"step=0, {other})"})
    holds, keeps = (
        f"w (value), optimizer (value), used (value), step (value){more}" for more in ("", ", extra (value)")
    )
    failed(job, f"the copy in memory holds {holds}; this script keeps {keeps}")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("kept.update(v=1)", "update(v=...): this name is not kept; kept are w, optimizer, used, step"),
        ("kept.update(w=numpy.zeros(6))", "w is float64 (6,) in update(), and was float64 (5,) in keep()"),
        ("mt.keep(f=lambda: 1)", "f cannot be kept: "),
        ("mt.keep(v=1), kept.update(step=1)", "a Trainer or another keep() came after this one"),
        ("mt.elastic(lambda world: mt.keep(v=1))", "call keep() before mt.elastic"),
    ],
)
def test_wrong_use(tmp_path: Path, call: str, text: str) -> None:
    source = SCRIPT.replace("WRONG", call)
    (tmp_path / "train.py").write_text(source)
    job = run_command([str(VENVS["mpich"] / "bin/python"), str(tmp_path / "train.py"), str(tmp_path)], cwd=tmp_path)
    failed(job, text)


def test_a_value_that_cannot_be_copied(tmp_path: Path) -> None:
    """The value ends the job. The copies do not stop quietly."""
    job = train(tmp_path, "kept.update(step=lambda: 1)", tries=2)
    failed(job, "CheckpointError: rank 0 on ", "step cannot be kept: ")
    assert "is not copied" not in job.stderr


def test_sigterm_ends_a_loop_that_saves_nothing(tmp_path: Path) -> None:
    """No other host is left. The loop ends at its next copy, not by the signal."""
    wrong = """if rank == 1 and step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)"""
    job = train(tmp_path, wrong, **{"* 3\n": "* 3000\n"})
    assert job.code == 128 + signal.SIGTERM, job.output
    ended = re.search(rf"SIGTERM told rank 1 to end on {HERE}: the job has ended after step (\d+)\n", job.stderr)
    assert ended, job.output
    assert f"mpitrain: step {ended[1]} is not saved: copies in memory end with the job\n" in job.stdout
    assert int(ended[1]) % EVERY == 0
