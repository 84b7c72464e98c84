"""How a guard on this machine starts, without ssh: the facts that it sends, and what can keep it from starting."""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import guarding
import pytest
from guarding import begin, wait_for

from jobs import until
from mpitrain.launch.connections import Connection, connect
from mpitrain.watching.view import process_state

# Fixtures: pytest finds them by these names.
wish, connections = guarding.wish, guarding.connections


def test_facts(wish: dict[str, Any], connections: list[Connection], tmp_path: Path) -> None:
    (tmp_path / "code/.venv").mkdir()
    (tmp_path / "code/.venv/hidden.py").touch()
    (tmp_path / "code/model").mkdir()
    (tmp_path / "code/model/net.py").touch()
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    facts = wait_for(connection, "facts")["facts"]
    assert facts["paths"] == {path: ["there"] for path in wish["paths"]}
    assert facts["routes"]["self"]["interface"] == "lo"
    environment = facts["environment"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["packages"]["numpy"]
    assert set(environment["files"]) == {"train.py", "model/net.py"}
    assert "MPICH" in environment["mpi"]


def test_paths_that_are_not_there(wish: dict[str, Any], connections: list[Connection], tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    wish["paths"] = [str(tmp_path / "share/venv/bin/python"), str(tmp_path / "nothing/train.py")]
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    facts = wait_for(connection, "facts")["facts"]
    assert list(facts["paths"].values()) == [["empty", f"{tmp_path}/share"], ["missing", f"{tmp_path}/nothing"]]
    assert "environment" not in facts


def test_a_shell_that_takes_a_line_of_what_is_sent(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a `read` in ~/.bashrc: the error says so, and the guard does not misread its input."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n$READ\nfor line; do :; done\nexec sh -c "$line"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("READ", ":")
    connection = connect("b", is_this_machine=False, wish=wish, now=0.0)
    connections.append(connection)
    wait_for(connection, "facts")
    monkeypatch.setenv("READ", "read answer")
    connection = connect("b", is_this_machine=False, wish=wish, now=0.0)
    connections.append(connection)
    with pytest.raises(AssertionError, match="b: the shell takes a line of what is sent to a command: a startup file"):
        wait_for(connection, "facts")


def test_a_python_that_fails(wish: dict[str, Any], connections: list[Connection]) -> None:
    wish["variables"] = {"PYTHONHOME": "/nowhere"}
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    error = wait_for(connection, "facts")["facts"]["environment"]["error"]
    assert f"{sys.executable} failed: " in error


def test_it_gives_signs_of_life_while_it_is_busy(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path
) -> None:
    """The guard is busy with a Python that does not answer."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done\n")
    python.chmod(0o755)
    connection = connect("here", is_this_machine=True, wish={**wish, "python": str(python)}, now=0.0)
    connections.append(connection)
    for _ in range(3):
        wait_for(connection, "alive")
    (tmp_path / "go").touch()
    wait_for(connection, "facts")


def test_a_python_that_does_not_answer_ends_with_a_guard_that_is_killed(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path
) -> None:
    python, said = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {said}.new\nmv {said}.new {said}\nexec sleep 1000\n")
    python.chmod(0o755)
    connection = connect("here", is_this_machine=True, wish={**wish, "python": str(python)}, now=0.0)
    connections.append(connection)
    until(lambda: connection.flush() or said.exists())
    asked = int(said.read_text())
    assert process_state(asked) in "SR"
    connection.process.kill()
    try:
        until(lambda: process_state(asked) in ("gone", "Z"), "it stays when nobody waits for it")
    finally:
        with suppress(ProcessLookupError):
            os.kill(asked, signal.SIGKILL)


def test_two_names_of_one_machine(wish: dict[str, Any], connections: list[Connection]) -> None:
    Path(wish["roll_call"]).touch()
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    assert wait_for(connection, "error")["error"] == "this is the same machine as another host of the job"


def test_it_may_open_as_many_files_as_there_may_be(wish: dict[str, Any], connections: list[Connection]) -> None:
    """Each rank takes three files, and the limit of a login is usually 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        connection = begin(wish, connections)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connection.send({"processes": 1})
    wait_for(connection, "processes")
    assert resource.prlimit(connection.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
