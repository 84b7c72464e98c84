"""Shared by the tests of the live view: a job that trains until it is ended, and its socket."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs import HANG_SECONDS, TOKEN, clean_environment, kill_all, until, without_restarts
from mpitrain.launch.live_jobs import LiveJob, LiveSource, find

# A step takes the first argument's seconds. With a folder as the second one, the record goes there.
SCRIPT = """
import sys, time
import numpy
import mpitrain as mt

def loss(parameters, batch, on_gradient):
    time.sleep(float(sys.argv[1]))
    on_gradient("w", parameters["w"])
    return 0.25

def build(world):
    data = mt.data.ArrayData(world, (numpy.zeros((24, 1)),), global_batch=8)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.zeros(5)}, mt.optim.SGD(0.1)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(1_000_000), mt.Record([mt.writers.JsonLines(sys.argv[2])], steps=2)]).run()
"""


@contextmanager
def training(folder: Path, ranks: int, *options: str, seconds: float = 0.02) -> Iterator[subprocess.Popen[str]]:
    """Run the script on so many ranks of this machine until the end of the `with`. Nothing of it is left then."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mpitrain", "run", "--hosts", "localhost", "-n", str(ranks)]
    command += without_restarts(options)
    token = folder.name + str(time.monotonic_ns())
    with subprocess.Popen(
        [*command, str(script), str(seconds), str(folder / "record")],
        env=clean_environment() | {TOKEN: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=HANG_SECONDS)
            finally:
                kill_all(token)


def job_of(folder: Path, fits: Callable[[dict[str, Any]], object] = lambda _: True, name: str = "script.py") -> LiveJob:
    """Return the job of a script in this folder, when what it does fits."""
    found: list[LiveJob] = []

    def is_there() -> bool:
        jobs, _ = find()
        found[:] = [job for job in jobs if job.answer["script"] == str(folder / name) and fits(dict(job.answer))]
        return bool(found)

    until(is_there, "the job cannot be watched")
    return found[0]


def trains(answer: dict[str, Any]) -> bool:
    """True if all ranks have made a step."""
    return answer["state"] == "trains" and all(entry["epoch"] for entry in answer["ranks"])


def answer_of(job: LiveJob, fits: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Watch a job until an answer fits, and return it."""
    line = job.watch(0.2)
    try:
        return answers_until(line, fits)[-1]
    finally:
        line.close()


def answers_until(line: LiveSource, fits: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    """Return the answers of a watch up to the first one that fits."""
    answers: list[dict[str, Any]] = []
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and not line.is_closed:
        answer = line.receive(1.0)
        if answer is not None:
            answers.append(answer)
            if fits(answer):
                return answers
    raise AssertionError(f"none of {len(answers)} answers fits; the last one is {answers[-1:]}")
