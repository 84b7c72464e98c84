"""An agent on this machine, without ssh: its start, what it sees of the job, and that it leaves nothing of the job."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import attempting
import pytest
from attempting import Open, is_alive, rank_of, tell, wait_for, wait_until_gone
from programs import program

from jobs import HANG_SECONDS, until
from mpitrain.watching.view import process_state

# Fixtures: pytest finds them by these names.
wish, asking, open_agent, job = attempting.wish, attempting.asking, attempting.open_agent, attempting.job


def test_facts(asking: dict[str, Any], open_agent: Open, tmp_path: Path) -> None:
    """It may open as many files as there may be: each rank takes three, and the limit of a login is usually 1024."""
    for name in (".venv/hidden.py", "model/net.py"):
        (tmp_path / "code" / name).parent.mkdir()
        (tmp_path / "code" / name).touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        connection = open_agent(asking)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    facts = wait_for(connection, "facts")
    assert facts["paths"] == {path: ["there"] for path in asking["paths"]}
    assert facts["routes"]["self"]["interface"] == "lo"
    environment = facts["environment"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["packages"]["numpy"]
    assert set(environment["files"]) == {"train.py", "model/net.py"}
    assert "MPICH" in environment["mpi"]
    tell(connection, asking, {"processes": 1})
    wait_for(connection, "processes")
    assert resource.prlimit(connection.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_shell_that_takes_a_line_of_what_is_sent(
    wish: dict[str, Any], open_agent: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a `read` in ~/.bashrc: the error says so, and the agent does not misread its input."""
    program(tmp_path / "ssh", '$READ\nfor line; do :; done\nexec sh -c "$line"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("READ", ":")
    wait_for(open_agent(wish, "b"), "facts")
    monkeypatch.setenv("READ", "read answer")
    with pytest.raises(AssertionError, match="b: the shell takes a line of what is sent to a command: a startup file"):
        wait_for(open_agent(wish, "b"), "facts")


def test_while_a_python_does_not_answer(asking: dict[str, Any], open_agent: Open, tmp_path: Path) -> None:
    """The agent gives signs of life and serves another attempt. That Python ends with an agent that is killed."""
    said = tmp_path / "pid"
    slow = program(tmp_path / "python", f"echo $$ > {said}.new\nmv {said}.new {said}\nexec sleep 1000")
    connection = open_agent({**asking, "python": str(slow)})
    for _ in range(3):
        wait_for(connection, "alive")
    until(said.exists)
    asked = int(said.read_text())
    assert process_state(asked) in "SR"
    other = {**asking, "token": "other", "roll_call": str(tmp_path / "other")}
    del other["python"]
    tell(connection, other, {"wish": other})
    wait_for(connection, "facts", lambda facts: "paths" not in facts)
    tell(connection, other, {"end": 0.0})
    assert wait_for(connection, "ended") == []
    assert process_state(asked) in "SR"
    connection.process.kill()
    try:
        until(lambda: process_state(asked) in ("gone", "Z"), "it stays when nobody waits for it")
    finally:
        with suppress(ProcessLookupError):
            os.kill(asked, signal.SIGKILL)


def test_two_names_of_one_machine(wish: dict[str, Any], open_agent: Open) -> None:
    Path(wish["roll_call"]).touch()
    assert wait_for(open_agent(wish), "error") == "this is the same machine as another host of the job"


def test_it_sees_how_far_ranks_are_and_who_is_gone(wish: dict[str, Any], open_agent: Open) -> None:
    connection = open_agent(wish)
    wait_for(connection, "facts")
    with rank_of(wish, 3) as started, rank_of(wish, 4, "init") as called:
        views = wait_for(connection, "ranks", lambda ranks: len(ranks) == 2)
        assert [
            (view["record"]["rank"], view["record"]["phase"], view["pid"], view["ended_seconds"]) for view in views
        ] == [(3, "started", started.pid, None), (4, "called", called.pid, None)]
        started.kill()
        expected = {"rank": 3, "parent_of": [], "seconds": ANY, "pid": started.pid, "kernel": ANY, "code": -9}
        assert wait_for(connection, "first_end") == expected
        views = wait_for(connection, "ranks")
        assert [view["ended_seconds"] is None for view in views] == [False, True]
        with rank_of(wish, 3, "init") as again:  # another process becomes the rank
            view, _ = wait_for(connection, "ranks", lambda ranks: ranks[0]["pid"] == again.pid)
            assert view["ended_seconds"] is None


def test_while_it_is_watched_it_looks_at_the_processes_and_the_load(wish: dict[str, Any], open_agent: Open) -> None:
    """It does so until nobody has asked for some seconds."""
    connection = open_agent(wish)
    wait_for(connection, "facts")
    with rank_of(wish, 3, "init") as rank:

        def wait_for_state(*states: str) -> None:
            wait_for(connection, "ranks", lambda ranks: bool(ranks) and ranks[0]["state"] in states)

        wait_for_state("")
        tell(connection, wish, {"watch": 0.2})
        assert wait_for(connection, "load")["busy"] is None
        tell(connection, wish, {"watch": 0.2})
        load = wait_for(connection, "load", lambda one: one["busy"] is not None)
        assert 0 <= load["busy"] <= 1
        sizes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert load["memory_bytes"] == pytest.approx(sizes, rel=0.01)
        assert 0 < load["memory_used_bytes"] < load["memory_bytes"]
        wait_for_state("S", "R")
        rank.send_signal(signal.SIGSTOP)
        wait_for_state("T")
        wait_for_state("")
        tell(connection, wish, {"watch": 0.2})
        wait_for_state("T")


def test_told_to_end_it_names_and_kills_what_is_left(wish: dict[str, Any], open_agent: Open, job: list[int]) -> None:
    connection = open_agent(wish)
    tell(connection, wish, {"processes": 1})
    assert {entry[0] for entry in wait_for(connection, "processes")} == {*job}
    tell(connection, wish, {"end": 0.0})
    left = wait_for(connection, "ended")
    assert {pid for pid, _ in left} == {*job}
    assert [job[1], "sleep 600"] in left
    wait_until_gone(job)
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_gone_it_ends_the_job(
    wish: dict[str, Any], open_agent: Open, job: list[int], tmp_path: Path
) -> None:
    """And removes what the launcher had in a folder."""
    agent, kept = tmp_path / "agent/ssh", tmp_path / "kept"
    agent.parent.mkdir()
    agent.touch()
    kept.touch()
    with socket.socket(socket.AF_UNIX) as of_ssh:
        of_ssh.bind(str(agent.with_name("master")))
    connection = open_agent({**wish, "ssh": str(agent)})
    wait_for(connection, "facts")
    connection.hang_up()
    wait_until_gone(job)
    assert connection.process.wait(HANG_SECONDS) == 0
    assert not Path(wish["roll_call"]).exists()
    assert not agent.parent.exists()
    assert kept.exists()


def test_when_the_launcher_is_silent_it_ends_the_job(wish: dict[str, Any], open_agent: Open, job: list[int]) -> None:
    connection = open_agent(wish, silence_seconds=8.0)
    wait_for(connection, "facts")
    for _ in range(20):
        connection.send({"beat": 1})
        time.sleep(0.5)
    assert is_alive(job[0])
    wait_until_gone(job)
    assert connection.process.wait(HANG_SECONDS) == 0
