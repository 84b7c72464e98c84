"""`mpitrain ps` and `mpitrain kill`, on this machine, and the id of a job for Tab."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.test_completion import completed
from jobs import HANG_SECONDS, Job, clean_environment, run_command, until
from mpitrain.cli import main
from mpitrain.launch.jobs import RunningJob

SCRIPT = """
import pathlib, signal, sys, time
import numpy
import mpitrain as mt
world = mt.init()
world.barrier()

class Halt(mt.Hook):  # in the third step; its loss is 1/2 on every rank
    def after_step(self, trainer, step):
        if step.number == 3:
            trainer.report({"norm": 0.25})
            signal.signal(signal.SIGTERM, self.end)
            pathlib.Path(sys.argv[1], f"ready.{world.rank}").touch()
            time.sleep(1000)

    def end(self, *_):
        time.sleep(0.5)
        pathlib.Path(sys.argv[1], f"ended.{world.rank}").touch()
        sys.exit(143)

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
    listed = json.loads(mpitrain("ps", "--hosts", "localhost", "--json").stdout)["jobs"]
    (entry,) = [one for one in listed if one["job"] == token]
    assert ([*entry["ranks"].values()], entry["script"]) == ([[0, 1]], script)
    assert {rank: (facts["step"], facts["epoch"]) for rank, facts in entry["facts"].items()} == {
        "0": (3, 3),
        "1": (3, 3),
    }
    of_kill, of_tell = completed(tmp_path, "mpitrain kill ", "mpitrain tell ")
    assert token in of_kill
    assert {token, "pause", "resume", "save", "stop", "rate", "set", "stacks", "kill"} <= of_tell
    job = mpitrain("kill", "--hosts", "localhost", token)
    assert (job.code, job.stdout) == (0, f"job {token} has ended on {socket.gethostname()}\n"), job.output
    assert launcher.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    assert line_of(tmp_path) is None
    # The launcher has passed the signal on, and nobody has killed the ranks meanwhile.
    assert {path.name for path in tmp_path.glob("ended.*")} == {"ended.0", "ended.1"}


def test_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kill", "--hosts", "localhost", "12345678"]) == 1
    expected = f"mpitrain kill: there is no job 12345678 of yours on {socket.gethostname()}; running: "
    assert capsys.readouterr().err.startswith(expected)


def test_metrics_that_are_not_finite(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no NaN and no infinity."""
    metrics = {"loss": math.nan, "norm": math.inf, "least": -math.inf, "rate": 0.1}
    record = SimpleNamespace(step=3, facts={"step": 3}, metrics=metrics, status="", steering=False)
    view: Any = SimpleNamespace(record=record, host="a", state="R", seconds=0.0)
    job = RunningJob("1a2b3c4d", since=1.5, ranks={0: view}, launcher="a 1", is_launched=True)
    monkeypatch.setattr("mpitrain.launch.jobs.find_all", lambda _placement: ([job], [], {}))
    assert main(["ps", "--hosts", "localhost", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["jobs"]
    assert one["metrics"] == {"loss": "NaN", "norm": "Infinity", "least": "-Infinity", "rate": 0.1}
