"""The file in which ranks say their steps, and the order in which processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpitrain.launch.deaths import Deaths, Orphans
from mpitrain.launch.guard import steps_path
from mpitrain.launch.steps import Report, last_step, read_reports, reporter


def test_ranks_overwrite_their_lines(tmp_path: Path) -> None:
    roll_call = str(tmp_path / "roll-call")
    file = Path(steps_path(roll_call))
    file.touch()
    assert read_reports(file.read_text()) == {}
    assert last_step({}) is None
    ranks = {rank: reporter(roll_call, rank) for rank in (4, 1)}
    for step in (99, 100, 101):
        ranks[4](step)
    ranks[1](100)
    expected = {1: Report(os.getpid(), 100, 100), 4: Report(os.getpid(), 99, 101)}
    assert read_reports(file.read_text()) == expected
    assert (last_step(expected), last_step(expected, 1), last_step(expected, 3)) == (101, 100, 101)
    file.unlink()
    ranks[1](101)  # the launcher has gone
    assert list(tmp_path.iterdir()) == []


def test_without_a_launcher_nothing_is_written(tmp_path: Path) -> None:
    reporter("", 0)(1)
    reporter(str(tmp_path / "nowhere"), 0)(1)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_has_lost_its_parent() -> None:
    """Found at the second look; one that has ended is not looked at any more."""
    starts = "import subprocess; print(subprocess.Popen(['sleep', '100']).pid, flush=True); input()"
    parents = [
        subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    pids = [int(parent.stdout.readline()) for parent in parents if parent.stdout]
    orphans = Orphans()
    try:
        for rank, (pid, parent) in enumerate(zip(pids, parents, strict=True)):
            orphans.watch(rank, pid, parent.pid)
        assert orphans.look() == []
        for parent in parents[1:]:
            parent.kill()
            parent.wait()
        os.kill(pids[2], signal.SIGKILL)
        while Path(f"/proc/{pids[2]}").exists() and "State:\tZ" not in Path(f"/proc/{pids[2]}/status").read_text():
            time.sleep(0.01)
        assert orphans.look() == []
        assert orphans.look() == [1]
        assert orphans.look() == [1]
    finally:
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)
        for parent in parents:
            parent.communicate()


def test_who_had_ended_before_anybody_looked_is_not_known() -> None:
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    deaths = Deaths()
    try:
        deaths.watch(0, processes[0].pid)
        processes[1].kill()
        while (
            "State:\tZ" not in Path(f"/proc/{processes[1].pid}/status").read_text()
        ):  # its parent, we, have not looked
            time.sleep(0.01)
        processes[0].kill()
        processes[0].wait()
        deaths.watch(1, processes[1].pid)
        assert deaths.first() is None
    finally:
        deaths.close()
        for process in processes:
            process.kill()
            process.wait()


def test_who_ended_first() -> None:
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(5)]
    deaths = Deaths()
    try:
        for name, process in enumerate(processes):
            deaths.watch(name, process.pid)
            deaths.watch(name, process.pid)  # nothing new
        assert deaths.first() is None
        for name in (3, 0, 4):
            processes[name].kill()
            processes[name].wait()
        assert deaths.first() == 3
        processes[1].kill()
        processes[1].wait()
        assert deaths.first() == 3
        deaths.watch(9, processes[4].pid)  # who knows when it ended
        assert deaths.first() is None
    finally:
        deaths.close()
        for process in processes:
            process.kill()
            process.wait()
