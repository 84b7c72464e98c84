"""`mpitrain run --restarts`: a training that is killed goes on from its checkpoint; one that cannot succeed ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import pytest

from faults.outcome import failed, succeeded
from jobs import VENVS, Job, run_command

HERE = socket.gethostname()

# 20 steps with a checkpoint every 4. What goes wrong is what a test puts into WRONG, which runs before every step.
SCRIPT = """
import os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
world = mt.init()
rank = world.rank

def once(name):
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def kill():
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
    data = mt.ArrayData(world, (random.standard_normal((60, 5)), random.standard_normal(60)), global_batch=12)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(5)}, mt.Sgd(0.01, momentum=0.9)), mt.Sync(), data)

trainer = mt.Trainer(build, [mt.StopAtStep(20), mt.Checkpoint(folder / "checkpoints", steps=4)])
trainer.run()
if world.is_root:
    numpy.save(folder / "w.npy", trainer.adapter.parameters()["w"])
"""


def train(
    folder: Path,
    wrong: str,
    *options: str,
    vendor: str = "mpich",
    env: Mapping[str, str] | None = None,
    during: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Job:
    """Run the training with what goes wrong in it, three times at most."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.replace("WRONG", wrong))
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--restarts", "2", *options]
    return run_command([*command, str(folder / "train.py"), str(folder)], cwd=folder, env=env, during=during)


def tries(job: Job) -> list[str]:
    """What the supervisor says of each try."""
    return re.findall(r"^mpitrain: (try .*)$", job.stderr, re.M)


def parameters(folder: Path) -> bytes:
    """What the training ended with, to the bit."""
    return numpy.load(folder / "w.npy").tobytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The parameters of a training in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = train(folder, "pass")
    succeeded(job)
    assert tries(job) == []
    return parameters(folder)


def test_a_killed_rank(tmp_path: Path, vendor: str, uninterrupted: bytes) -> None:
    job = train(tmp_path, "if rank == 1 and step == 7 and once('killed'): kill()", vendor=vendor)
    succeeded(job)
    found = tries(job)
    how = r"(was killed by signal 9|was killed, or left without a word; mpiexec ended with code 137)"
    assert re.fullmatch(rf"try 1 of 3 failed at step 7: rank 1 on {HERE} {how}; starting again on {HERE}", found[0])
    assert found[1:] == ["try 2 of 3 came to its end"]
    assert job.stdout.count("resumed from ") == 1
    assert parameters(tmp_path) == uninterrupted


def test_an_exception_on_a_rank(tmp_path: Path, uninterrupted: bytes) -> None:
    wrong = "if rank == 2 and step in (10, 15) and once(f'raised-{step}'): raise OSError('the disk is gone')"
    job = train(tmp_path, wrong)
    succeeded(job)
    cause = f"rank 2 on {HERE} failed: OSError: the disk is gone"
    assert tries(job) == [
        f"try 1 of 3 failed at step 10: {cause}; starting again on {HERE}",
        f"try 2 of 3, from step 8, failed at step 15: {cause}; starting again on {HERE}",
        "try 3 of 3 came to its end",
    ]
    assert parameters(tmp_path) == uninterrupted


def test_mpiexec_is_killed(tmp_path: Path, uninterrupted: bytes) -> None:
    # The third parent up: of a rank that is Hydra's proxy, then mpiexec.
    wrong = """if rank == 0 and step == 10 and once("killed"):
        proxy = os.getppid()
        os.kill(int(pathlib.Path(f"/proc/{proxy}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(100)"""
    job = train(tmp_path, wrong)
    succeeded(job)
    assert len(tries(job)) == 2, job.output
    assert parameters(tmp_path) == uninterrupted


def test_always_at_the_same_step(tmp_path: Path) -> None:
    job = train(tmp_path, "if rank == 0 and step == 10: kill() if once('killed') else os._exit(7)")
    failed(job)
    assert job.code in (7, 137), job.output  # MPICH may give that of a rank that it has killed itself
    found = tries(job)
    assert len(found) == 3, job.output
    assert all(", from step 8, failed at step 10: " in line for line in found[1:]), job.output
    assert "not started again: 3 tries failed at step 10; look at the program" in found[2]
    assert job.stdout.count("resumed from ") == 2


def test_an_error_before_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for source in ("import mpitrain as mt\nimport nothing_such", "import mpitrain as mt\nmt.init(algorithm='rign')"):
        script.write_text(source)
        command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", "--restarts", "2"]
        job = run_command([*command, str(script)])
        failed(job, "not started again: it failed before its first step, and would do so again")
        assert len(tries(job)) == 1, job.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    def interrupt(process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "there").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, number)

    wrong = "if step == 10:\n        once('there')\n        time.sleep(100)"
    job = train(tmp_path, wrong, during=interrupt)
    failed(job)
    assert job.code == 128 + number, job.output
    assert tries(job) == []


def test_wrong_options(tmp_path: Path) -> None:
    for options, message in (
        (["--min-nodes", "2"], "--min-nodes is 2, but the job runs on 1 hosts"),
        (["--restarts", "-1"], "'-1' is not a whole number, 0 or above"),
        (["--restarts", "0", "--min-nodes", "1"], "--min-nodes says on how few hosts"),
    ):
        job = train(tmp_path, "pass", *options)
        failed(job, message)
        assert job.code == 2
        assert tries(job) == []
