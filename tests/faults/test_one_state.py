"""An order in a pause changes the state after a step that was copied already; a rank dies before its host has copied.

The job goes on from one state on all ranks, whatever each host has in memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from faults.outcome import succeeded
from faults.telling import Teller, script, steps_of, train
from jobs import run_command, until
from keeping import keeper, kept_id

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


SLOW = [pytest.param(order, marks=pytest.mark.nightly) for order in ("resume", "set decay=0.5")]


@pytest.mark.parametrize("order", ["rate 0.5", *SLOW])
def test_a_rank_is_killed(tmp_path: Path, order: str) -> None:
    """The launcher knows of the order."""
    paused: list[int] = []

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        before = teller.job()
        telling = hold(teller, *order.split())
        teller.kill_rank(1)
        telling.join()
        until(lambda: teller.job() != before, "there was no second try")
        if order != "resume":
            assert teller.applied("resume") == paused[0]
        teller.wait_for_step(paused[0] + 2)
        teller.end()

    with keeper() as name:
        source = TWO_HOSTS.replace("OTHER", name) + script(COMPARES)
        job = train(tmp_path, during, "--restarts", "1", ranks=3, source=source)
    succeeded(job)
    assert job.stdout.count(f"resumed from memory at step {paused[0]}\n") == 1, job.output
    steps = steps_of(tmp_path)
    expected = {"rate 0.5": (0.005, 0.25), "set decay=0.5": (0.01, 0.5)}.get(order, (0.01, 0.25))
    assert {tuple(row[2:]) for row in steps} == {expected}
    assert steps[0][0] == paused[0] + 1


@pytest.mark.parametrize("order", ["rate 0.5", *SLOW[:1]])
def test_the_launcher_is_killed(tmp_path: Path, order: str) -> None:
    """The next launcher knows only of what is in memory: the newest of it holds on all ranks."""
    paused: list[int] = []

    def resumed(process: subprocess.Popen[str]) -> None:
        teller = Teller(tmp_path, process.pid)
        if order != "resume":
            assert "multiplied by 0.5 now" in teller.tell().stdout
            assert teller.applied("resume") == paused[0]
        teller.wait_for_step(paused[0] + 2)
        teller.end()

    def during(teller: Teller) -> None:
        paused.append(teller.applied("pause"))
        telling = hold(teller, *order.split())
        os.kill(teller.launcher, signal.SIGKILL)
        telling.join()
        succeeded(run_command([sys.executable, "-m", "mpitrain", "run", "--resume", kept_id(tmp_path)], during=resumed))

    with keeper() as name:
        source = TWO_HOSTS.replace("OTHER", name) + script(COMPARES)
        job = train(tmp_path, during, "--restarts", "1", ranks=3, source=source)
    assert job.code == -signal.SIGKILL
    steps = steps_of(tmp_path)
    assert steps[0][0] == paused[0] + 1
    assert {row[2] for row in steps} == {0.005 if order != "resume" else 0.01}
