"""A rank of a pipeline is killed in the middle of the schedule; and a model that fits only as a pipeline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import failed, succeeded
from jobs import REPOSITORY, VENVS, Job, run_command
from ranks import layered

SCRIPT = """
import os, pathlib, signal, sys
sys.path.insert(0, {repository!r})
import mpitrain as mt
from tests.ranks import layered

folder = pathlib.Path(sys.argv[1])
world = mt.init()
calls = 0

class Killed(layered.Dense):
    def backward(self, parameters, kept, gradient):
        global calls
        calls += 1
        # In the third of four micro-batches of step 5. Step 4 has three samples, and so three micro-batches.
        if sys.argv[2] == "kill" and calls == 3 * 4 + 3 + 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().backward(parameters, kept, gradient)

layers = [layered.Dense(n) for n in range(layered.LAYERS)]
layers[2] = Killed(2)  # on rank 1 of 3
build = layered.builder(45, 14, lambda: mt.Pipeline(3, micro_batches=4), layers)

class Say(mt.Hook):
    def after_step(self, trainer, step):
        world.print(f"step {{step.number}} loss {{step.loss!r}}")

mt.Trainer(build, [mt.StopAtStep(8), Say()]).run()
"""


def train(folder: Path, *options: str, kill: bool = True, vendor: str = "mpich") -> Job:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(repository=str(REPOSITORY)))
    run = [str(VENVS[vendor] / "bin/mpitrain"), "run", "-n", "3", *options]
    return run_command([*run, str(script), str(folder), "kill" if kill else "go on"], timeout=120)


def losses(job: Job) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", job.stdout)}


def test_a_rank_that_is_killed_mid_schedule(tmp_path: Path) -> None:
    """The job ends and names it; with --restarts it goes on from memory, with the losses of a run without a fault."""
    job = train(tmp_path)
    failed(job, "rank 1")
    assert max(losses(job)) == 4
    (tmp_path / "killed").unlink()
    job = train(tmp_path, "--restarts", "1")
    succeeded(job)
    assert re.search(r"resumed from memory at step [1-4]$", job.stdout, re.M), job.output
    whole = train(tmp_path, kill=False)
    succeeded(whole)
    assert losses(job) == losses(whole)
    assert len(losses(whole)) == 8


def test_stages_do_not_go_on_without_a_rank(tmp_path: Path) -> None:
    """--recover alone is refused before the first step; with --restarts the job goes on from the copy in memory."""
    vendor = need("openmpi")
    job = train(tmp_path, "--recover", vendor=vendor)
    failed(job, "--recover alone does not work with several stages", "Give --restarts N")
    assert not losses(job)
    assert not (tmp_path / "killed").exists()
    job = train(tmp_path, "--recover", "--restarts", "1", vendor=vendor)
    succeeded(job)
    assert re.search(r"resumed from memory at step [1-4]$", job.stdout, re.M), job.output
    assert (tmp_path / "killed").exists()
    found = losses(job)
    assert list(found) == list(range(1, 9))
    _, expected = layered.plain(45, 14, 8)
    assert list(found.values()) == pytest.approx(expected, rel=1e-13)


@pytest.mark.nightly
def test_a_model_that_fits_only_as_a_pipeline() -> None:
    """One rank has no room for it; two and four train it, with the losses of one rank without a limit."""
    pytest.importorskip("torch")

    def run(ranks: int, *options: str) -> Job:
        run = [str(VENVS["mpich"] / "bin/mpitrain"), "run", "-n", str(ranks), "examples/pipeline_gpt.py"]
        return run_command([*run, "--steps", "4", *options], timeout=300)

    failed(run(1), "memory")
    of_runs = []
    for job in (run(1, "--room-mib", "0"), run(2), run(4)):
        succeeded(job)
        lines = re.findall(r"step (\d)/4 \| loss (\d+\.\d+)", job.stdout)  # a slow run has more lines
        of_runs.append([float(loss) for step, loss in lines if step in "14"])
    assert len(of_runs[0]) == 2
    for found in of_runs[1:]:
        assert found == pytest.approx(of_runs[0], abs=2e-4)
