"""A guard on this machine, without ssh: what it sees of the job, and that it leaves nothing of the job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import guarding
import pytest
from guarding import begin, is_alive, rank_of, wait_for, wait_for_trouble, wait_until_gone

from jobs import HANG_SECONDS, until
from mpitrain.launch.connections import Connection
from mpitrain.launch.shared_files import FOLDER
from mpitrain.launch.watch import Guards

# Fixtures: pytest finds them by these names.
wish, connections, job = guarding.wish, guarding.connections, guarding.job


def test_it_sees_how_far_ranks_are_and_who_is_gone(wish: dict[str, Any], connections: list[Connection]) -> None:
    connection = begin(wish, connections)
    with rank_of(wish, 3) as started, rank_of(wish, 4, "init") as called:
        views = wait_for(connection, "ranks", lambda ranks: len(ranks) == 2)["ranks"]
        assert [(view["record"]["rank"], view["record"]["phase"], view["pid"]) for view in views] == [
            (3, "started", started.pid),
            (4, "called", called.pid),
        ]
        assert [view["ended_seconds"] for view in views] == [None, None]
        started.kill()
        expected = {"rank": 3, "parent_of": [], "seconds": ANY, "pid": started.pid, "kernel": ANY, "code": -9}
        assert wait_for(connection, "first_end")["first_end"] == expected
        views = wait_for(connection, "ranks")["ranks"]
        assert [view["ended_seconds"] is None for view in views] == [False, True]


def test_while_it_is_watched_it_looks_at_the_processes(wish: dict[str, Any], connections: list[Connection]) -> None:
    """It does so until nobody has asked for some seconds."""
    connection = begin(wish, connections)
    with rank_of(wish, 3, "init") as rank:

        def wait_for_state(*states: str) -> None:
            wait_for(connection, "ranks", lambda ranks: bool(ranks) and ranks[0]["state"] in states)

        wait_for_state("")
        connection.send({"watch": 0.2})
        wait_for_state("S", "R")
        rank.send_signal(signal.SIGSTOP)
        wait_for_state("T")
        wait_for_state("")
        connection.send({"watch": 0.2})
        wait_for_state("T")


def test_another_process_becomes_the_rank(wish: dict[str, Any], connections: list[Connection]) -> None:
    connection = begin(wish, connections)
    with rank_of(wish, 1, "init") as first:
        wait_for(connection, "ranks", lambda ranks: [view["pid"] for view in ranks] == [first.pid])
    wait_for(connection, "ranks", lambda ranks: ranks[0]["ended_seconds"] is not None)
    with rank_of(wish, 1, "init") as second:
        (view,) = wait_for(connection, "ranks", lambda ranks: ranks[0]["pid"] == second.pid)["ranks"]
        assert view["ended_seconds"] is None


def test_told_to_end_it_names_and_kills_what_is_left(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    assert job.stdout is not None
    below = int(job.stdout.readline())
    connection = begin(wish, connections)
    connection.send({"processes": 1})
    assert {entry[0] for entry in wait_for(connection, "processes")["processes"]} == {job.pid, below}
    connection.send({"end": 0.0})
    ended = wait_for(connection, "ended")
    assert {pid for pid, _ in ended["ended"]} == {job.pid, below}
    assert [below, "sleep 600"] in ended["ended"]
    assert ended["immortal"] == []
    wait_until_gone(job.pid, below)
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_gone_it_ends_the_job(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    assert job.stdout is not None
    below = int(job.stdout.readline())
    connection = begin(wish, connections)
    connection.hang_up()
    wait_until_gone(job.pid, below)
    assert connection.process.wait(HANG_SECONDS) == 0
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_gone_it_removes_what_that_had_in_a_folder(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path
) -> None:
    agent, kept = tmp_path / "agent/ssh", tmp_path / "kept"
    agent.parent.mkdir()
    agent.touch()
    kept.touch()
    with socket.socket(socket.AF_UNIX) as of_ssh:
        of_ssh.bind(str(agent.with_name("master")))
    connection = begin({**wish, "agent": str(agent)}, connections)
    connection.hang_up()
    assert connection.process.wait(HANG_SECONDS) == 0
    assert not agent.parent.exists()
    assert kept.exists()


def test_in_place_of_a_killed_guard_another_one_ends_the_job(
    wish: dict[str, Any], job: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The new guard ends the job's processes and its roll call, and removes MPI's files since the first guard began."""
    assert job.stdout is not None
    below = int(job.stdout.readline())
    with Guards("here", ["here"], {"here": wish}) as guards:
        guards.facts()
        guards.start()
        until(lambda: guards.reports["here"].since)
        file = Path(FOLDER) / f"mpich_shm_{uuid.uuid4().hex[:8]}_test"
        file.write_bytes(bytes(4096))
        try:
            os.kill(guards._connections["here"].process.pid, signal.SIGKILL)
            wait_for_trouble(guards)
            killed = "here: the guard of the job there was killed by signal 9"
            assert guards.trouble == f"{killed}\nThe job is ended on all hosts"
            assert is_alive(job.pid)
            assert is_alive(below)
            guards.end(0.0)
            assert {pid for pid, _ in guards.reports["here"].left or []} == {job.pid, below}
            assert guards.reports["here"].immortal == []
            assert not file.exists()
        finally:
            file.unlink(missing_ok=True)
    wait_until_gone(job.pid, below)
    assert not Path(wish["roll_call"]).exists()


def test_a_living_launcher_removes_its_socket_itself(wish: dict[str, Any], tmp_path: Path) -> None:
    """The guard of a try that is dropped does not look whether somebody listens there."""
    path = tmp_path / "of_launcher.live"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        with Guards("here", ["here"], {"here": {**wish, "live": str(path)}}) as guards:
            guards.facts()
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert path.exists()


def test_when_the_launcher_is_silent_it_ends_the_job(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    wish["silence_seconds"] = 8.0
    connection = begin(wish, connections)
    for _ in range(20):
        connection.send({"beat": 1})
        time.sleep(0.5)
    assert is_alive(job.pid)
    wait_until_gone(job.pid)
    assert connection.process.wait(HANG_SECONDS) == 0


def test_reports_do_not_change_while_they_are_read(wish: dict[str, Any]) -> None:
    """The main thread reads the reports while the guards' thread receives new ones."""
    with Guards("here", ["here"], {"here": wish}) as guards:
        guards.facts()
        before = guards.reports["here"].ranks
        guards.start()
        with rank_of(wish, 5):
            until(lambda: guards.reports["here"].ranks)
        assert before == {}


def test_an_end_is_one_even_if_it_may_not_be_the_first(wish: dict[str, Any]) -> None:
    """The ranks that mpiexec then tells to end by SIGTERM must hear that the job fails."""
    told: list[bool] = []
    keepers: Any = SimpleNamespace(beat=lambda _records, *, is_ending, has_failed: told.append(is_ending or has_failed))
    with Guards("here", ["here"], {"here": wish}, keepers) as guards:
        guards.facts()
        guards.start()
        with rank_of(wish, 0, "init", "old kernel") as first, rank_of(wish, 1, "init", "old kernel"):
            until(lambda: len(guards.reports["here"].ranks) == 2)
            assert not any(told)
            first.kill()
            until(lambda: told[-1])
        assert guards.first_ends() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_trouble(wish: dict[str, Any]) -> None:
    """Otherwise the launcher would go on without the watch, and the guards would end the job for no visible reason."""
    with Guards("here", ["here"], {"here": wish}) as guards:
        assert guards.facts()["here"]["cores"] == len(os.sched_getaffinity(0))
        guards.start()
        guards.phases.when.clear()  # so that the next report fails
        with rank_of(wish, 0):
            wait_for_trouble(guards)
        assert guards.trouble == "the job is ended on all hosts, because it cannot be watched: KeyError('started')"
