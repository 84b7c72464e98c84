"""What `mpitrain tell` and `scale` tell a launcher at its socket: who is heard there, and what harms neither side."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from test_supervisor import DONE, Job

from jobs import HANG_SECONDS, until
from mpitrain.launch.control import ask, socket_of
from mpitrain.launch.ending import Ended
from mpitrain.launch.events import Limits
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.live import Live
from mpitrain.launch.orders import Orders
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.supervisor import Supervisor, telling
from mpitrain.watching.rank_record import RankRecord

LAUNCHER = launcher_name(os.getpid())


@contextmanager
def told(orders: Orders, supervisor: Supervisor | None = None) -> Iterator[None]:
    with Live("train.py", [], 0.0) as live, telling(live, orders, supervisor):
        yield


def test_a_job_without_keepers(capsys: pytest.CaptureFixture[str]) -> None:
    with told(Orders()):
        answer = ask(LAUNCHER, {"leave": ["b"]})
        why = (
            "its hosts cannot change, because no keepers hold its state meanwhile; start the job with --max-restarts N"
        )
        assert answer == {"refused": why}
        with told(Orders()):  # the name of the socket is taken, and the job continues
            said = capsys.readouterr().err
    assert "nobody can tell this job anything (mpitrain tell, scale): " in said
    assert "Address already in use" in said


def test_the_stacks_of_many_ranks() -> None:
    """They have more bytes than the buffer of a socket."""
    lines = [f"rank {rank} on a runs" + "\u00fc" * 1000 for rank in range(500)]
    orders = Orders()
    many: Any = SimpleNamespace(
        records=lambda: {0: RankRecord(0)}, lost=set, give=lambda order: None, stacks=lambda: lines
    )
    orders.lead(many)
    with told(orders):
        answer = ask(LAUNCHER, {"tell": {"kind": "stacks"}, "from": "lab1"})
    assert answer == {"accepted": "\n".join(lines)}


def test_errors_that_nobody_expects(keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    """A message that makes no sense, and faults of the launcher: it prints a line, and its threads continue."""

    def ask_it(job: Job) -> Ended:
        job.train()
        for wish, why in (({"dance": 1}, ""), ({"join": "odd"}, ': RuntimeError("can\'t start new thread")')):
            assert "does not answer" in ask(LAUNCHER, wish)["refused"]
            said = capsys.readouterr().err
            assert "a request of `mpitrain tell` or `scale` could not be answered" in said and why in said
        heard: list[str] = []
        keepers.told = {99: 0.0}  # no rank of the job
        fault = "may not change as they should: StopIteration"
        job.looks(lambda: heard.append(capsys.readouterr().err) or fault in heard[-1])
        keepers.told = {}
        assert "accepted" in ask(LAUNCHER, {"leave": ["b"]})
        return DONE

    job = Job(keepers, Limits(1), ask_it)
    with told(Orders(), job.supervisor):
        assert job.to_end() == 0


def test_many_at_once_and_the_end() -> None:
    """Each of 32 waits for its answer, also at the end of the job; one more is sent away, and looks go on."""
    asked, may_answer = list[Any](), threading.Event()

    def tell(wish: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(wish)
        may_answer.wait(HANG_SECONDS)
        return {"accepted": "yes"}

    with ThreadPoolExecutor(32) as pool:
        with Live("train.py", [], 0.0) as live, live.telling(tell, may_answer.set):
            answers = [pool.submit(ask, LAUNCHER, {"tell": number}) for number in range(32)]
            until(lambda: len(asked) == 32)
            gone = {"refused": "its launcher does not answer: the other side has hung up"}
            assert ask(LAUNCHER, {"tell": 32}) == gone
        assert [one.result() for one in answers] == [{"accepted": "yes"}] * 32


PAUSE = {"tell": {"kind": "pause"}, "from": "elsewhere"}
# As another user: the request alone, as a program of one's own may send it; and `ask`, which looks who is at the other
# end. All modules are there before.
AS_NOBODY = """
import json, os, pathlib, socket, sys
sys.path[:] = {path!r}
from mpitrain.launch import control
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
wish, at = {wish!r}, pathlib.Path({at!r})
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
    line.settimeout(60)
    try:
        line.connect(str(at))
        line.sendall(json.dumps({{"wish": wish, "version": 1}}).encode() + b"\\n")
        print("answer", line.recv(1000))
    except OSError as error:
        print(type(error).__name__)
control.socket_of = lambda launcher: at
print(control.ask("", wish)["refused"])
"""


class Heard(Orders):
    """Orders of a job, and what has been told to it."""

    def __init__(self) -> None:
        super().__init__("it is a test")
        self.heard: list[str] = []

    def answer(self, order: Mapping[str, Any], teller: str) -> dict[str, Any]:
        self.heard.append(teller)
        return super().answer(order, teller)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_heard() -> None:
    orders, path = Heard(), socket_of(LAUNCHER)
    program = AS_NOBODY.format(path=sys.path, at=str(path), wish=PAUSE)

    def as_nobody() -> list[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()

    with told(orders):
        said = as_nobody()
        assert said == ["PermissionError", "its launcher does not answer: [Errno 13] Permission denied"]
        try:  # if the modes did not keep others out, the launcher itself would
            path.parent.chmod(0o711)
            path.chmod(0o666)
            alone, asked = as_nobody()
        finally:
            path.parent.chmod(0o700)
            path.chmod(0o600)
        assert alone in ("answer b''", "ConnectionResetError", "BrokenPipeError")
        assert asked == f"its socket belongs to user {os.geteuid()}"
        assert orders.heard == []
        assert ask(LAUNCHER, PAUSE) == {"refused": "it is a test"}
        assert len(orders.heard) == 1
    assert ask(LAUNCHER, PAUSE)["refused"].startswith("its launcher does not answer: ")
