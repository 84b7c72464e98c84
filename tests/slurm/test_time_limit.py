"""A job whose time is up, or which is preempted: it is saved, started again, and loses no step."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from slurm_daemons import NODES, Slurm
from slurm_programs import MPITRAIN, bits, submitted

from jobs import run_command, until

STEPS = 120
# A step takes 20 ms, and in the second half of a first start in Slurm 2 s: so the job is told before it ends, however
# busy the machine is. What was done is noted by rank 0, after each step.
TRAINING = f"""
import hashlib, itertools, os, time
import numpy
import mpitrain as mt

class Note(mt.Hook):
    def after_step(self, trainer, step):
        if trainer.world.rank == 0:
            with open("steps.txt", "a") as file:
                file.write(f"{{os.environ.get('SLURM_RESTART_COUNT', '0')}} {{step.number}}\\n")

is_first_start = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
calls = itertools.count(1)

def loss(parameters, batch, on_gradient):
    x, y = batch
    time.sleep(2.0 if next(calls) > {STEPS} // 2 and is_first_start else 0.02)
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    numbers = numpy.random.default_rng(5)
    x = numbers.standard_normal((50, 7))
    data = mt.data.ArrayData(world, (x, x @ numpy.arange(7.0) + 0.1 * numbers.standard_normal(50)), global_batch=13)
    return mt.Parts(mt.ArrayFunction(loss, {{"w": numpy.zeros(7)}}, mt.optim.SGD(0.02)), mt.Sync(), data)

trainer = mt.Trainer(build, [mt.StopAtStep({STEPS}), mt.Checkpoint("saved", steps=1000), Note()])
trainer.run()
if trainer.step_number == {STEPS}:
    text = hashlib.sha256(numpy.ascontiguousarray(trainer.adapter.parameters()["w"]).tobytes()).hexdigest()
    print(f"bits of rank {{trainer.world.rank}}: {{text}}", flush=True)
"""


def steps_of(folder: Path) -> list[tuple[int, int]]:
    """The start of the job and the number of each step that was made, in order."""
    path = folder / "steps.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(start), int(step)) for start, step in (line.split() for line in lines)]


def without_slurm(folder: Path) -> dict[int, str]:
    """Train in one go, and return the bits of the result."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    job = run_command([*MPITRAIN, "run", "-n", "2", "--hosts", "localhost", "train.py"], cwd=folder)
    assert job.code == 0, job.output
    assert [step for _, step in steps_of(folder)] == list(range(1, STEPS + 1))
    return bits(job.stdout)


def started(slurm: Slurm, folder: Path) -> str:
    """Submit the training, on two ranks of one node."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    return submitted(slurm, folder, "--nodes", "1", "--ppn", "2", options=(f"--nodelist={NODES[0]}",))


def told(slurm: Slurm, folder: Path, job: str, *, urgent: bool) -> None:
    """Preempt the job by a more urgent one, or tell it that its time is up, and let it start again."""
    before = int(slurm.state(job)["Restarts"])
    if urgent:
        script = folder / "urgent.sh"
        script.write_text("#!/bin/sh\nsleep 0.1\n")
        slurm.submit(script, "--partition=urgent", "--exclusive", f"--nodelist={NODES[0]}", "--output=/dev/null")
    else:
        slurm.command("scancel", "--batch", "--signal=USR1", job)

    def is_over() -> bool:
        state = slurm.state(job)
        return int(state["Restarts"]) > before or state["JobState"] == "COMPLETED"

    until(is_over, f"job {job} in {folder} was not started again")
    slurm.start_again(job, folder / f"train-{job}.out")


def check(slurm: Slurm, folder: Path, job: str, reference: dict[int, str]) -> int:
    """The job ends, has made each step once, and has the bits of one go. Return how often it was started again."""
    ended = slurm.wait(job)
    output = (folder / f"train-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", output
    assert [step for _, step in steps_of(folder)] == list(range(1, STEPS + 1)), output
    assert bits(output) == reference, output
    return int(ended["Restarts"])


def test_a_job_whose_time_is_up_goes_on_and_loses_no_step(slurm: Slurm, tmp_path: Path) -> None:
    reference = without_slurm(tmp_path / "alone")
    folder = tmp_path / "in slurm"
    job = started(slurm, folder)
    until(lambda: len(steps_of(folder)) > 5, "no step was made")
    told(slurm, folder, job, urgent=False)
    assert check(slurm, folder, job, reference) == 1
    starts = {start for start, _ in steps_of(folder)}
    assert starts == {0, 1}
    said = (folder / f"train-{job}.out").read_text()
    saved = re.findall(r"the run ends, and is saved, after step (\d+)", said)
    assert len(saved) == 1 and f"resumed from saved/step-{int(saved[0]):08d}" in said, said


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_preempted_at_random_moments_no_step_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    """Twenty times, each at another moment of the job: by a more urgent job, or by the signal before the limit."""
    reference = without_slurm(tmp_path / "alone")
    moments = random.Random(20)
    for number in range(20):
        folder = tmp_path / f"job {number}"
        job = started(slurm, folder)
        until(lambda job=job: slurm.state(job)["JobState"] != "PENDING", "the job does not start")
        # Before the first step, or after any step of the first half: the job must not end before it is told.
        due = moments.randrange(-5, STEPS // 2)
        until(lambda folder=folder, due=due: len(steps_of(folder)) >= due, "the job makes no steps")
        time.sleep(moments.uniform(0.0, 0.02) if due >= 0 else moments.uniform(0.0, 1.0))
        told(slurm, folder, job, urgent=number % 2 == 0)
        assert check(slurm, folder, job, reference) == 1
        first = max((step for start, step in steps_of(folder) if start == 0), default=0)
        print(
            f"{number + 1} of 20: told at step {first}, {'preempted' if number % 2 == 0 else 'by the signal'}",
            flush=True,
        )
