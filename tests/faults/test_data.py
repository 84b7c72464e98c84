"""Data that cannot be read, in the thread that reads ahead: the job ends and names the rank, sample and file."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from faults.outcome import report_of, succeeded
from jobs import Job, run_job

# A data set with one file per sample.
TRAIN = """
import pathlib, sys, threading, time
import numpy
import mpitrain as mt

class Files:
    def __init__(self, folder):
        self.files = sorted(pathlib.Path(folder).glob("*.npy"))
    def __len__(self):
        return len(self.files)
    def __getitem__(self, number):
        time.sleep(seconds)
        return numpy.load(self.files[number])

def loss_and_gradients(parameters, batch, on_gradient):
    on_gradient("w", batch.sum(axis=0))
    return 0.0

def build(world):
    data = mt.data.MapData(world, Files(sys.argv[1]), global_batch=6, shuffle=False)
    adapter = mt.ArrayFunction(loss_and_gradients, {"w": numpy.zeros(3)}, mt.optim.SGD(0.01))
    return mt.Parts(adapter, mt.Sync(), mt.data.Prefetch(data, batches=2))

seconds = float(sys.argv[2])
trainer = mt.Trainer(build, [mt.StopAtStep(4)])
trainer.run()
trainer.world.print("trained", trainer.step_number, "steps,", [thread.name for thread in threading.enumerate()][1:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(60):
        numpy.save(tmp_path / f"{number:02d}.npy", numpy.full(3, float(number)))
    return tmp_path


def train(folder: Path, seconds: float = 0.0) -> Job:
    return run_job(3, TRAIN, str(folder), str(seconds), timeout=30)


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_the_end_of_a_program_does_not_wait_for_what_is_read_ahead(folder: Path, seconds: float) -> None:
    """A thread that is still reading does not delay the end either."""
    job = train(folder, seconds)
    succeeded(job)
    assert job.stdout == "trained 4 steps, ['mpitrain prefetch']\n"
    assert not job.stderr


@pytest.mark.parametrize("fault", ["cut short", "gone"])
def test_a_file_that_cannot_be_read(folder: Path, fault: str) -> None:
    """Rank 1 has samples 20 and 21 in the fourth step."""
    bad = folder / "21.npy"
    if fault == "cut short":
        bad.write_bytes(bad.read_bytes()[:-5])
    else:
        bad.unlink()
        bad.symlink_to(folder / "not there")  # still in the list
    job = train(folder)
    report = report_of(job, "in sample 21")
    assert report.rank == 1
    assert ("FileNotFoundError" if fault == "gone" else "ValueError") in report.text
