"""Checkpoints through whole jobs: disks that fail, processes that are killed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from faults.failing import nightly
from faults.outcome import failed, report_of, succeeded
from jobs import VENVS, Job, mpiexec, run_command, run_job
from mpitrain.state import load

# -- disks -----------------------------------------------------------------------------------------------------------
# A small regression. A test inserts its fault between the parts.
BEGIN = """
import os, pathlib, resource, sys
import numpy
import mpitrain as mt
import mpitrain.training.hooks.checkpoint as its

its._PATIENCE_SECONDS = float("inf")  # every save that is due is there, also on a slow disk
world = mt.init()
rank = world.rank
samples, width, dtype, steps, global_batch, checkpoints = 60, 5, "float64", 4, 12, sys.argv[1]
function = lambda parameters, batch, on_gradient: regression(parameters, batch, on_gradient)
"""
TRAIN = """
def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] + parameters["b"] - y
    on_gradient("b", 2 * error.mean(keepdims=True) if len(x) else numpy.zeros(1, dtype))
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((samples, width)).astype(dtype), random.standard_normal(samples).astype(dtype)
    data = mt.data.ArrayData(world, (x, y), global_batch=global_batch)
    parameters = {"w": numpy.zeros(width, dtype), "b": numpy.zeros(1, dtype)}
    return mt.Parts(mt.ArrayFunction(function, parameters, mt.optim.SGD(0.01, momentum=0.9)), mt.Sync(), data)

trainer = mt.Trainer(build, [mt.StopAtStep(steps), mt.Checkpoint(checkpoints, steps=2)])
trainer.run()
world.print("trained", trainer.step_number, "steps")
"""


def train(ranks: int, folder: Path, wrong: str = "") -> Job:
    return run_job(ranks, BEGIN + wrong + TRAIN, str(folder))


# A test inserts what rank 0 does before a step: before[3] = lambda: ... By then, each write of an earlier step has
# succeeded or failed.
EVENTS = """
import threading
before = {}
first, calls = function, 0

def function(*arguments):
    global calls
    calls += 1
    if rank == 0 and calls in before:
        for thread in threading.enumerate():
            if thread.name == "mpitrain checkpoint":
                thread.join()
        before[calls]()
    return first(*arguments)
"""
# Each checkpoint has 40 kB of parameters and 40 kB of velocities.
LARGE = "width, checkpoints = 10_000, pathlib.Path(sys.argv[1])\ndtype = 'float32'\n" + EVENTS


def in_a_small_disk(tmp_path: Path, wrong: str, ranks: int = 3) -> tuple[Job, Path]:
    """Run the job with a disk of 480 kB, in a mount namespace that ends with the job. Copy what was on the disk."""
    small, copy, script = tmp_path / "small", tmp_path / "copy", tmp_path / "script.py"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=480k none {small}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs root, to mount a small disk in a mount namespace")
    script.write_text(BEGIN + LARGE + wrong + TRAIN)
    line = f"{' '.join(mpiexec(ranks))} {VENVS['mpich']}/bin/python {script} {small}"
    job = run_command(
        ["unshare", "-m", "sh", "-c", f"{mount} && {{ {line}; code=$?; cp -a {small} {copy}; exit $code; }}"]
    )
    return job, copy


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILL = "before[3] = lambda: (checkpoints / 'other').write_bytes(bytes(380_000))\n"
GOES_ON = "training continues, and the next save tries again. Earlier checkpoints are intact"


MOUNT = "before[{}] = lambda: os.system(f'mount -o remount,{} {{checkpoints}}')\n"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (FILL + "before[5] = lambda: (checkpoints / 'other').unlink()\n", "No space left on device"),
        *nightly((MOUNT.format(3, "ro") + MOUNT.format(5, "rw"), "Read-only file system")),
    ],
)
def test_a_disk_that_takes_nothing_for_a_while(tmp_path: Path, wrong: str, why: str) -> None:
    job, copy = in_a_small_disk(tmp_path, wrong + "steps = 6\n")
    succeeded(job)
    assert job.stdout == "trained 6 steps\n"
    (line,) = job.stderr.splitlines()
    assert re.search(rf"cannot write the checkpoint .*/small/step-00000004: .*{why}.*{GOES_ON}$", line), line
    assert names_in(copy) == ["step-00000002", "step-00000006"]
    assert [load(copy / name)["step"] for name in names_in(copy)] == [2, 6]


@pytest.mark.nightly
def test_a_disk_that_is_full_at_the_end(tmp_path: Path) -> None:
    patient = "import mpitrain.job.failure as its\nits._ARBITRATION_SECONDS = 60.0\n"
    job, copy = in_a_small_disk(tmp_path, FILL + patient)
    report = report_of(
        job, "/small/step-00000004: ", "CheckpointError: ", "cannot write the checkpoint ", "No space left on device"
    )
    assert job.stderr.count("/small/step-00000004: ") == 1, job.output
    assert report.rank == 0  # the one that writes: only its report has the cause
    assert names_in(copy) == ["other", "step-00000002"]
    assert load(copy / "step-00000002")["adapter"]["parameters"]["w"].shape == (10_000,)


@pytest.mark.nightly
def test_a_disk_that_goes_away(tmp_path: Path) -> None:
    """An empty directory is left in place of the disk, or none at all. The next checkpoints are taken there."""
    wrong = "before[3] = lambda: os.system(f'umount -l {checkpoints}')\nsteps = 5\n"
    job, copy = in_a_small_disk(tmp_path, wrong, ranks=2)
    succeeded(job)
    assert names_in(copy) == ["step-00000004", "step-00000005"]
    gone = LARGE + "import shutil\nbefore[3] = lambda: shutil.rmtree(checkpoints)\nsteps = 5\n"
    succeeded(train(2, tmp_path / "a/b", gone))
    assert names_in(tmp_path / "a/b") == ["step-00000004", "step-00000005"]


LIMIT = LARGE + "before[3] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"


@pytest.mark.parametrize(
    ("wrong", "below", "said", "left"),
    [
        ("", "file/checkpoints", ("Not a directory", "FOLDER/file/checkpoints"), ["file"]),
        *nightly(
            (
                LIMIT,
                "",
                ("cannot write the checkpoint FOLDER/step-00000004: ", "File too large"),
                ["file", "step-00000002"],
            )
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, wrong: str, below: str, said: tuple[str, ...], left: list[str]
) -> None:
    (tmp_path / "file").touch()
    job = train(3, tmp_path / below, wrong)
    report_of(job, "CheckpointError: ", *(text.replace("FOLDER", str(tmp_path)) for text in said))
    assert "failed too" not in job.stderr
    assert names_in(tmp_path) == left


# -- kill -9 ---------------------------------------------------------------------------------------------------------
# Rank 0 is killed after it has written the tensors of step 4, and before it marks them as complete.
KILL = """
import signal
from mpitrain.state import store

to_text = store.to_text
def kill(manifest):
    if manifest.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return to_text(manifest)
store.to_text = kill
"""


def test_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    large = "width, samples = 1_000_000, 6\nglobal_batch, steps = 6, 6\ndtype = 'float32'\n"
    job = run_job(2, BEGIN + large + KILL + TRAIN, str(folder))
    failed(job)
    assert [name for name in names_in(folder) if name.startswith("step")] == ["step-00000002"]
    (remains,) = folder.glob(".writing-step-00000004-*")
    job = run_job(3, BEGIN + large + TRAIN, str(folder))
    succeeded(job)
    assert f"{remains} is incomplete; it is skipped" in job.stderr
    assert f"resumed from {folder}/step-00000002 at step 2" in job.stdout
    assert names_in(folder) == ["step-00000002", "step-00000004", "step-00000006"]
    assert load(folder / "step-00000006")["step"] == 6
