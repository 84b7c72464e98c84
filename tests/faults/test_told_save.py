"""A save that somebody has told a job to make, and a kill in the middle of it: no half of a checkpoint counts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import succeeded
from faults.telling import CHECKPOINT, Teller, events_of, rows_of, script, steps_of, train
from jobs import HANG_SECONDS, VENVS, run_command, until
from keeping import kept_id
from mpitrain.state.store import entries, half_written, name_of, verify

MPITRAIN = [sys.executable, "-m", "mpitrain"]
# Part of the state, so that a write takes a while.
BULK = """
class Bulk(mt.Hook):
    def state(self):
        return {"bulk": numpy.full(1 << 23, 7.0)}

    def restore(self, state):
        assert state["bulk"].shape == (1 << 23,) and (state["bulk"] == 7.0).all()

"""


def source() -> str:
    text = script(hooks=CHECKPOINT.replace("[", "[Bulk(), "))
    return text.replace('(folder / f"pid', f'{BULK}(folder / f"pid', 1)


def stopped_in_a_save(teller: Teller) -> int:
    """Tell the job to save, and stop rank 0 while it writes. Return the step that it writes."""
    teller.job()  # trains now
    checkpoints, pid = teller.folder / "checkpoints", int((teller.folder / "pid.0").read_text())
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        steps: list[int] = []
        telling = threading.Thread(target=lambda into=steps: into.append(teller.applied("save")))
        telling.start()
        while not half_written(checkpoints) and not (steps and (checkpoints / name_of(steps[0])).exists()):
            assert time.monotonic() < deadline, "nothing is written"
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        is_half = bool(half_written(checkpoints))
        if not is_half:  # on a busy machine it may be written before this process has seen it
            os.kill(pid, signal.SIGCONT)
        telling.join()  # the answer comes as soon as the save has begun
        if is_half:
            return steps[0]


def has_no_half(folder: Path, step: int) -> None:
    """A checkpoint of this step is not there, and those that are there are whole."""
    assert not (folder / "checkpoints" / name_of(step)).exists()
    for entry in entries(folder / "checkpoints"):
        verify(entry.path)


def texts_of(folder: Path) -> list[tuple[int, str]]:
    return [(event["after_step"], event["text"]) for event in events_of(folder) if event["source"] == "told"]


def is_in_record(folder: Path, step: int, output: str) -> bool:
    """True if the record has the save, or the training went on from a step before it."""
    resumed = re.search(r"resumed from memory at step (\d+)", output)
    assert resumed is not None, output
    return (step, BEGUN) in texts_of(folder) or int(resumed[1]) < step


BEGUN = "the save of a checkpoint has begun"


@pytest.mark.parametrize("vendor", ["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)])
def test_the_rank_that_writes_is_killed(tmp_path: Path, vendor: str) -> None:
    """The record says that the save had begun, and no more. The next try can save."""
    steps: list[int] = []

    def during(teller: Teller) -> None:
        before = teller.job()
        step = stopped_in_a_save(teller)
        teller.kill_rank(0)
        until(lambda: teller.job() != before, "there was no second try")
        has_no_half(tmp_path, step)
        steps.extend([step, teller.applied("save")])
        until((tmp_path / "checkpoints" / name_of(steps[1])).exists)
        steps.append(teller.applied("stop"))

    job = train(tmp_path, during, "--restarts", "1", source=source(), python=VENVS[need(vendor)] / "bin/python")
    succeeded(job)
    assert is_in_record(tmp_path, steps[0], job.stdout), texts_of(tmp_path)
    assert texts_of(tmp_path)[-2:] == [(steps[1], BEGUN), (steps[2], "the run ends, and is saved")]
    assert half_written(tmp_path / "checkpoints") == []
    assert verify(tmp_path / "checkpoints" / name_of(steps[2])).step == steps[2] == steps_of(tmp_path)[-1][0]


@pytest.mark.nightly
def test_the_launcher_is_killed(tmp_path: Path) -> None:
    """Another launcher goes on from the memory of the hosts, and not from half of a checkpoint."""
    steps: list[int] = []

    def resumed(process: subprocess.Popen[str]) -> None:
        teller = Teller(tmp_path, process.pid)
        teller.job()
        has_no_half(tmp_path, steps[0])
        steps.append(teller.applied("stop"))

    def during(teller: Teller) -> None:
        steps.append(stopped_in_a_save(teller))
        os.kill(teller.launcher, signal.SIGKILL)
        again = run_command([*MPITRAIN, "run", "--resume", kept_id(tmp_path)], during=resumed)
        succeeded(again)
        assert is_in_record(tmp_path, steps[0], again.stdout), texts_of(tmp_path)

    job = train(tmp_path, during, "--restarts", "1", source=source())
    assert job.code == -signal.SIGKILL
    assert verify(tmp_path / "checkpoints" / name_of(steps[1])).step == steps[1] == steps_of(tmp_path)[-1][0]


def test_a_stop_is_saved_by_the_next_try(tmp_path: Path) -> None:
    """A rank is killed when the run has ended, and is being saved: the next try makes no step more, and saves it."""
    steps: list[int] = []

    def during(teller: Teller) -> None:
        teller.job()  # trains now
        telling = threading.Thread(target=lambda: steps.append(teller.applied("stop")))
        telling.start()
        until(lambda: half_written(tmp_path / "checkpoints") or entries(tmp_path / "checkpoints"), "nothing is written")
        with suppress(ProcessLookupError):  # on a busy machine the run may have ended by now
            teller.kill_rank(0)
        telling.join()

    job = train(tmp_path, during, "--restarts", "1", source=source())
    succeeded(job)
    assert verify(tmp_path / "checkpoints" / name_of(steps[0])).step == steps[0]
    rows = [row["step"] for row in rows_of(tmp_path)]
    assert max(rows) == steps[0]
