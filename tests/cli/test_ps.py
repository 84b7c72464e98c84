"""`mpitrain ps` and `mpitrain kill`, on this machine."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import HANG_SECONDS, Job, clean_environment, run_command, until

SCRIPT = """
import pathlib, sys, time
import numpy
import mpitrain as mt
world = mt.init()
world.barrier()

class Halt(mt.Hook):  # in the third step; its loss is 1/2 on every rank
    def after_step(self, trainer, step):
        if step.number == 3:
            trainer.report({"norm": 0.25})
            pathlib.Path(sys.argv[1], f"ready.{world.rank}").touch()
            time.sleep(1000)

def loss(parameters, batch, on_gradient):
    on_gradient("w", parameters["w"])
    return 0.5

def build(world):
    data = mt.data.ArrayData(world, (numpy.zeros((4, 1)),), global_batch=4)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(9), Halt()]).run()
"""


def mpitrain(*arguments: str) -> Job:
    return run_command([sys.executable, "-m", "mpitrain", *arguments])


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job of two ranks that never ends."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mpitrain", "run", "--hosts", "localhost", "-n", "2", str(script), str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=clean_environment(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            until(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
            yield process
        finally:
            process.kill()


def line_of(folder: Path) -> list[str] | None:
    """The columns of `mpitrain ps` for the job whose script is in this folder."""
    # Not its exit code: a job of another test may have a server whose list cannot be read.
    job = mpitrain("ps", "--hosts", "localhost")
    assert job.stdout.startswith("JOB ") or job.stdout.startswith("no job of yours is running on "), job.output
    lines = [line for line in job.stdout.splitlines() if str(folder) in line]
    return re.split(r"  +", lines[0]) if lines else None


def test_a_job_is_listed_and_ended_by_its_id(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    found = line_of(tmp_path)
    assert found is not None
    token, since, state, step, metrics, ranks, script = found
    assert re.fullmatch("[0-9a-f]{8}", token)
    began = time.mktime(time.strptime(since, "%Y-%m-%d %H:%M:%S"))  # in whole seconds
    assert (tmp_path / "script.py").stat().st_mtime - 1 < began <= time.time()
    assert step == "3"
    assert re.fullmatch(r"loss 0\.5, samples/s \S+, norm 0\.25", metrics)
    assert (state, ranks) == ("trains", f"0,1 on {socket.gethostname()}")
    assert script == f"{tmp_path / 'script.py'} {tmp_path}"
    job = mpitrain("kill", "--hosts", "localhost", token)
    assert (job.code, job.stdout) == (0, f"job {token} has ended on {socket.gethostname()}\n"), job.output
    assert launcher.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    assert line_of(tmp_path) is None


def test_a_job_that_is_not_there() -> None:
    job = mpitrain("kill", "--hosts", "localhost", "12345678")
    assert job.code == 1
    expected = f"mpitrain kill: there is no job 12345678 of yours on {socket.gethostname()}; running: "
    assert job.stderr.startswith(expected), job.output
