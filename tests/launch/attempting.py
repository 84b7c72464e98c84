"""Shared by the tests of agents: a launcher's request, a job, its ranks, and waits for messages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.context import JOB
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.watch import AttemptOnHosts


@pytest.fixture
def wish(tmp_path: Path) -> dict[str, Any]:
    """The request for an attempt that a launcher sends to an agent. Without `python`, it asks for no facts."""
    return {
        "token": uuid.uuid4().hex,
        "roll_call": str(tmp_path / "roll_call"),
        "peers": {"self": "127.0.0.1"},
    }


@pytest.fixture
def asking(wish: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same, which asks for facts."""
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.touch()
    about = {"python": sys.executable, "paths": [str(script), str(tmp_path)], "script": str(script), "variables": {}}
    return {**wish, **about}


Open = Callable[..., Connection]


@pytest.fixture
def open_agent() -> Iterator[Open]:
    """Starts an agent, and an attempt there. Its connection is closed after the test."""
    opened: list[Connection] = []

    def open_agent(wish: dict[str, Any], host: str = "here", silence_seconds: float = HANG_SECONDS) -> Connection:
        opened.append(connect(host, host == "here", {"silence_seconds": silence_seconds}, now=0.0))
        tell(opened[-1], wish, {"wish": wish})
        return opened[-1]

    yield open_agent
    for connection in opened:
        connection.hang_up()
        connection.close(HANG_SECONDS)


@pytest.fixture
def job(wish: dict[str, Any]) -> Iterator[list[int]]:
    """The ids of a process with the mark of the job, and of a child of it without the mark."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True); input()"
    environ, pipe = {**os.environ, JOB: wish["token"]}, subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        yield [process.pid, int(process.stdout.readline())]
        process.kill()


def tell(connection: Connection, wish: dict[str, Any], message: dict[str, Any]) -> None:
    """Send a message of the attempt of that wish."""
    connection.send({"attempt": wish["token"], **message})


def wait_for(connection: Connection, key: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    """Wait for a message that has this key, and return what it has there."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and not connection.is_closed:
        connection.flush()  # a pipe takes at most 64 KiB at once
        for message in connection.receive(time.monotonic()):
            if key in message and fits(message[key]):
                return message[key]
        time.sleep(0.02)
    raise AssertionError(f"no {key}: {connection.why_closed() if connection.is_closed else 'silence'}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    until(lambda: not any(map(is_alive, pids)), "still there")


RANK = """
import sys
from mpitrain.watching import roll_call
from mpitrain.watching.activity import publish
from mpitrain.watching.rank_record import CALLED
from mpitrain.watching.roll_call import appear
path, number, has_begun = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if "old kernel" in has_begun:
    roll_call._PIDFD_OPEN = 1 << 20  # no kernel has a system call of this number
if has_begun:
    activity = publish(number)
    activity.enter(CALLED)
    activity.appear(path)
else:
    appear(path, number)
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def rank_of(wish: dict[str, Any], number: int, *has_begun: str) -> Iterator[subprocess.Popen[str]]:
    """A process that answers the roll call as this rank, and optionally reports that it is in init()."""
    command = [sys.executable, "-c", RANK, wish["roll_call"], str(number), *has_begun]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


def wait_for_trouble(attempt: AttemptOnHosts) -> str:
    until(lambda: attempt.trouble is not None)
    return attempt.trouble or ""
