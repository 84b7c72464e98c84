"""A guard on this machine, without ssh: its facts, what it sees of the job, and that it leaves nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.launch.activity import process_numbering
from mpitrain.launch.connections import Connection, connect, explain
from mpitrain.launch.guard import MARK
from mpitrain.launch.roll_call import CALLED, STARTED, sign
from mpitrain.launch.watch import Guards

DEADLINE_SECONDS = 20.0


@pytest.fixture
def wish(tmp_path: Path) -> dict[str, Any]:
    """What a launcher asks for."""
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text("print('hello')\n")
    return {
        "python": sys.executable,
        "paths": [str(script), str(tmp_path)],
        "script": str(script),
        "variables": {},
        "peers": {"self": "127.0.0.1"},
        "token": uuid.uuid4().hex,
        "roll_call": str(tmp_path / "roll_call"),
        "silence_seconds": DEADLINE_SECONDS,
    }


@pytest.fixture
def connections() -> Iterator[list[Connection]]:
    """Those that a test opens; closed after it."""
    opened: list[Connection] = []
    yield opened
    for connection in opened:
        connection.hang_up()
        connection.close(DEADLINE_SECONDS)


@pytest.fixture
def job(wish: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process with the mark of the job, and one below it without."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MARK: wish["token"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def wait_for(connection: Connection, key: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    """The message with this key."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and not connection.is_closed:
        for message in connection.receive(time.monotonic()):
            if key in message and fits(message[key]):
                return message
        time.sleep(0.02)
    raise AssertionError(f"no {key}: {connection.why_closed() if connection.is_closed else 'silence'}")


def begin(wish: dict[str, Any], connections: list[Connection]) -> Connection:
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    wait_for(connection, "facts")
    return connection


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


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


def test_a_python_that_fails(wish: dict[str, Any], connections: list[Connection]) -> None:
    wish["variables"] = {"PYTHONHOME": "/nowhere"}
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    error = wait_for(connection, "facts")["facts"]["environment"]["error"]
    assert f"{sys.executable} failed: " in error


def test_two_names_of_one_machine(wish: dict[str, Any], connections: list[Connection]) -> None:
    Path(wish["roll_call"]).touch()
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    assert wait_for(connection, "error")["error"] == "this is the same machine as another host of the job"


def test_it_sees_who_signs_and_who_is_gone(wish: dict[str, Any], connections: list[Connection]) -> None:
    connection = begin(wish, connections)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        sign(wish["roll_call"], STARTED, 3, str(rank.pid))
        sign(wish["roll_call"], CALLED, 3)
        signed = wait_for(connection, "signed", bool)["signed"]
        assert signed == [f"started 3 {rank.pid}", "called 3"]
    assert wait_for(connection, "gone", bool)["gone"] == [3]


def test_it_sees_who_vanishes(wish: dict[str, Any], connections: list[Connection]) -> None:
    connection = begin(wish, connections)
    with subprocess.Popen(["true"]) as dead, subprocess.Popen(["sleep", "60"]) as live:
        dead.wait()
        about = f"-1 {os.getpid()}"
        sign(wish["roll_call"], CALLED, 1, f"{dead.pid} {about} {process_numbering()}")
        sign(wish["roll_call"], CALLED, 2, f"{live.pid} {about} {process_numbering()}")
        # In a container, by its own numbers.
        sign(wish["roll_call"], CALLED, 3, f"{dead.pid} {about} 1")
        assert wait_for(connection, "vanished", bool)["vanished"] == [1]
        # Another process has become the rank.
        sign(wish["roll_call"], CALLED, 1, f"{live.pid} {about} {process_numbering()}")
        assert wait_for(connection, "vanished", lambda ranks: not ranks)["orphans"] == []
        live.kill()


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
    assert connection.process.wait(DEADLINE_SECONDS) == 0
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_silent_it_ends_the_job(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    wish["silence_seconds"] = 3.0
    connection = begin(wish, connections)
    for _ in range(5):
        connection.send({"beat": 1})
        time.sleep(1.0)
    assert is_alive(job.pid)
    wait_until_gone(job.pid)
    assert connection.process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_trouble(wish: dict[str, Any]) -> None:
    """Else the launcher would go on without it, and the guards would end the job for no reason that anybody sees."""
    with Guards("here", ["here"], {"here": wish}) as guards:
        assert guards.facts()["here"]["cores"] == len(os.sched_getaffinity(0))
        guards.start()
        Path(wish["roll_call"]).write_text("nonsense 0\n")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while guards.trouble is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert guards.trouble == "the job is ended on all hosts, because it cannot be watched: KeyError('nonsense')"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "@@@ REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed.",
            "`mpitrain cluster trust b`",
        ),
        ("No ED25519 host key is known for b\nHost key verification failed.", "is it a node of this cluster?"),
        ("u@b: Permission denied (publickey).", "Is this the cluster's user"),
        ("ssh: Could not resolve hostname b: Name or service not known", "`getent hosts b`"),
        ("ssh: connect to host b port 22: Connection refused", "`systemctl start ssh`"),
        ("ssh: connect to host b port 22: Connection timed out", "Is it switched on"),
        ("bash: line 1: /usr/bin/python3: No such file or directory", "Install python3 there"),
    ],
)
def test_why_ssh_failed(words: str, remedy: str) -> None:
    text = explain("b", words, 255)
    assert text.startswith(f"b: {words.splitlines()[-1]}: ")
    assert remedy in text


def test_an_end_without_a_word() -> None:
    assert explain("b", "", 137) == "b: ended with code 137, without a word"
