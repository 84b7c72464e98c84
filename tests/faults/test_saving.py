"""Too few hosts are left: the job starts once more, makes no step, saves what was reached, and ends.

The launcher is real. On one machine no host can be lost, so only its verdict is made up: after each failure, too few
hosts can take part. tests/cluster/test_restart_over_hosts.py has real hosts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from faults.conftest import Undisturbed
from faults.failing import HERE, nightly
from faults.outcome import succeeded
from faults.test_keep import SCRIPT as LOOP
from faults.training import STEPS, result, resumed, train, went_on
from jobs import Job, run_command
from mpitrain.state.manifest import read_manifest
from mpitrain.state.store import load

REASON = f"only {HERE} of {HERE}, b can take part, and the job needs 2"
LAUNCHER = f"""
import sys
from mpitrain.cli import main
from mpitrain.launch import policy
from mpitrain.launch.where import Verdict

policy.judge = lambda state, *_: Verdict(reason={REASON!r}, left=state.hosts.hosts)
sys.exit(main())
"""
NOTHING = "no host has the state in memory; the same command continues from the newest checkpoint, if any"
STEPPED = "if os.environ.get('_MPITRAIN_SAVES'): (folder / 'stepped').touch()"
DIES = f"{STEPPED}\n    if step == 8 and rank == world.size - 1 and once('killed'): die()"
SAVES = "[mt.Checkpoint(folder / 'checkpoints', steps=1000)]"


def few(folder: Path, wrong: str = DIES, goes_on: GoesOn | None = None, **arguments: Any) -> Job:
    """Run a training in which the last rank dies in step 8. The arguments are those of `train`."""
    (folder / "few.py").write_text(LAUNCHER)
    job = train(folder, wrong, launcher=[str(folder / "few.py")], during=goes_on, **arguments)
    if goes_on:
        job = replace(job, stderr=goes_on.said)
    assert job.code == 128 + 9, job.output
    assert job.left == []
    assert f" on {HERE} was killed by signal 9; {REASON}. Starting again on {HERE} only to save" in job.stderr, (
        job.output
    )
    assert not (folder / "stepped").exists(), "the try that only saves has made a step"
    return job


class GoesOn:
    """Waits for the end of the launcher, and continues from what it has left in memory. Mends what the test has broken.

    Attributes:
        said: what the launcher has said, on stderr.
        job: that continues.
    """

    said: str
    job: Job

    def __init__(self, folder: Path) -> None:
        self._broken = folder / "saved"

    def __call__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.said = process.stderr.read()
        if self._broken.exists():
            self._broken.unlink()
        (job,) = re.findall(r"To continue when more hosts can take part: `mpitrain resume (\w{8})`", self.said)
        self.job = run_command([sys.executable, "-m", "mpitrain", "resume", job], cwd=Path("/"))


@pytest.mark.parametrize(
    ("ranks", "vendor"), [(3, "mpich"), *nightly((2, "openmpi"), (1, "mpich"))], indirect=["vendor"]
)
def test_the_newest_step_is_saved(tmp_path: Path, ranks: int, vendor: str, undisturbed: Undisturbed) -> None:
    job = few(tmp_path, ranks=ranks, vendor=vendor, hooks=SAVES)
    assert job.stderr.endswith(f"mpitrain: {REASON}: the job has ended after step 7, which is saved\n"), job.output
    path = tmp_path / "checkpoints" / "step-00000007"
    assert f"mpitrain: {path} is saved; the same command continues from there\n" in job.stdout
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    about = read_manifest(path)
    assert (about.step, "loss" in about.information) == (7, False)
    # The same command continues, with the bits of an undisturbed training.
    again = train(tmp_path, hooks=SAVES, ranks=ranks, vendor=vendor)
    succeeded(again)
    assert f"resumed from {path} at step 7\n" in again.stdout
    parameters, losses = undisturbed(ranks, vendor)
    assert result(tmp_path) == (parameters, {step: loss for step, loss in losses.items() if step > 7})


@pytest.mark.nightly
def test_a_newer_checkpoint(tmp_path: Path) -> None:
    """Copies come every 5 steps. The checkpoint of step 6 is newer than the copy of step 5, and stays as it is."""
    hooks = "[mt.Checkpoint(folder / 'checkpoints', steps=6)]"
    wait = "while step == 8 and not (folder / 'checkpoints/step-00000006').exists(): time.sleep(0.01)\n    "
    job = few(tmp_path, wait + DIES, hooks=hooks, every=5)
    assert (
        "memory is not used: its newest copy is of step 5. The newest state is the checkpoint of step 6\n" in job.stdout
    )
    assert job.stderr.endswith("the job has ended after step 6, which is saved\n"), job.output
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


OWN_HOOK = """
class Saves(mt.Hook):
    def before_end(self, trainer, step):
        if world.is_root:
            state = trainer.state()
            numpy.savez(folder / "own.npz", w=trainer.adapter.parameters()["w"], step=state["step"])
            print("of step", step.number, step.loss, step.learning_rate, step.samples)
"""


@pytest.mark.nightly
def test_a_hook_of_ones_own_saves(tmp_path: Path) -> None:
    job = few(tmp_path, hooks="[Saves()]", before=OWN_HOOK)
    assert "of step 7 nan nan 0.0\n" in job.stdout
    assert job.stderr.endswith("the job has ended after step 7, which is saved\n"), job.output
    assert int(numpy.load(tmp_path / "own.npz")["step"]) == 7
    again = train(tmp_path / "seven", hooks="[mt.Checkpoint(folder / 'saved', 7)]")
    succeeded(again)
    seven = load(tmp_path / "seven" / "saved" / "step-00000007")
    assert seven["adapter"]["parameters"]["w"].tobytes() == numpy.load(tmp_path / "own.npz")["w"].tobytes()


# In step 8, the directory of the checkpoints becomes a file.
BREAKS = DIES.replace("die()", "((folder / 'saved').rename(folder / 'away'), (folder / 'saved').touch(), die())")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wrong", "hooks", "why"),
    [
        (DIES, "[]", "nothing saves step 7 on a disk: add the hook mt.Checkpoint"),
        (BREAKS, "[mt.Checkpoint(folder / 'saved', 1000)]", "cannot write into the checkpoint directory "),
    ],
)
def test_what_cannot_be_saved_is_kept(
    tmp_path: Path, wrong: str, hooks: str, why: str, undisturbed: Undisturbed
) -> None:
    """Another launcher continues from memory, with the bits of an undisturbed run, and the record has the event."""
    goes_on = GoesOn(tmp_path)
    few(tmp_path, wrong, hooks=f"[mt.Record([mt.writers.JsonLines(folder)], steps=1), *{hooks}]", goes_on=goes_on)
    assert re.search(
        rf"mpitrain: {REASON}; the state was not saved: rank \d on {HERE} failed: CheckpointError: .*{why}",
        goes_on.said,
    ), goes_on.said
    assert f"mpitrain: its state is kept in memory on {HERE} until " in goes_on.said.splitlines()[-1]
    assert "has lost its launcher" not in goes_on.said
    went_on(goes_on.job, tmp_path, [7], undisturbed())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    events = [(event["after_step"], event["source"], event["text"]) for row in rows for event in row.get("events", [])]
    assert events == [(7, "memory", REASON)]


@pytest.mark.nightly
def test_a_loop_of_ones_own_is_kept(tmp_path: Path) -> None:
    goes_on = GoesOn(tmp_path)
    source = LOOP.replace("WRONG", DIES.replace("step == 8", "step == 11"))
    (tmp_path / "few.py").write_text(LAUNCHER)
    (tmp_path / "train.py").write_text(source)
    command = [sys.executable, "few.py", "run", "-n", "2", "--max-restarts", "2", "train.py", str(tmp_path)]
    job = run_command(command, cwd=tmp_path, env={"MPITRAIN_MEMORY_STEPS": "3"}, during=goes_on)
    assert (job.code, job.left) == (128 + 9, [])
    assert "step 9 is in memory, and a loop with keep() saves nothing on a disk" in goes_on.said
    assert not (tmp_path / "stepped").exists()
    succeeded(goes_on.job)
    assert resumed(goes_on.job) == [9]
    assert numpy.load(tmp_path / "used.npy").tolist() == [3.0] * 61  # each sample once in an epoch


OWN_STEPS = """
class Own(mt.Trainer):
    def run(self):
        while self.step_number < 20:
            self.step()
mt.Trainer = Own
"""


@pytest.mark.nightly
def test_steps_of_ones_own_are_refused(tmp_path: Path) -> None:
    """Only `run` copies the state to memory, and can save it."""
    job = few(tmp_path, hooks=SAVES, before=OWN_STEPS)
    assert (
        "this attempt only saves what earlier attempts have reached, and makes no step; only Trainer.run" in job.stderr
    )
    assert job.stderr.endswith(f"mpitrain: {NOTHING}\n"), job.output


@pytest.mark.nightly
def test_nothing_to_save(tmp_path: Path) -> None:
    """No host has had room for a copy."""
    before = "from mpitrain.state import memory_slot\nmemory_slot._limits = lambda: [(100, 10**9, 'this machine')]"
    job = few(tmp_path, hooks=SAVES, before=before)
    assert "there is nothing to save: no host that takes part has a whole copy" in job.stderr
    assert job.stderr.endswith(f"mpitrain: {NOTHING}\n"), job.output
