"""The launcher's socket for `mpitrain tell` and `scale`: who is heard there, and what harms neither side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from test_supervisor import DONE, Job

from jobs import HANG_SECONDS
from mpitrain.launch.control import ask
from mpitrain.launch.ending import Ended
from mpitrain.launch.events import Limits
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.orders import Orders
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.supervisor import Tellers
from mpitrain.watching.rank_record import RankRecord

LAUNCHER = launcher_name(os.getpid())


def test_a_job_without_keepers(capsys: pytest.CaptureFixture[str]) -> None:
    with Tellers(Orders(), None):
        answer = ask(LAUNCHER, {"leave": ["b"]})
        why = (
            "its hosts cannot change, because no keepers hold its state meanwhile; start the job with --max-restarts N"
        )
        assert answer == {"refused": why}
        with Tellers(Orders(), None):  # the name of the socket is taken, and the job continues
            said = capsys.readouterr().err
    assert "nobody can tell this job anything (mpitrain tell, scale): " in said
    assert "Address already in use" in said


def test_the_stacks_of_many_ranks() -> None:
    """They have more bytes than a message of a socket, and than its buffer."""
    lines = [f"rank {rank} on a runs" + "\u00fc" * 1000 for rank in range(500)]
    orders = Orders()
    many: Any = SimpleNamespace(
        records=lambda: {0: RankRecord(0)}, lost=set, give=lambda order: None, stacks=lambda: lines
    )
    orders.lead(many)
    with Tellers(orders, None):
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
    with Tellers(Orders(), job.supervisor):
        assert job.to_end() == 0


PAUSE = {"tell": {"kind": "pause"}, "from": "elsewhere"}
# As another user: `ask`, which looks who is at the other end; the messages alone, as a program of one's own may send
# them; and, until the test ends it, one connection after the other that says nothing. All modules are there before.
AS_NOBODY = """
import os, select, socket, sys
sys.path[:] = {path!r}
from mpitrain.launch import control
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
launcher, wish = {launcher!r}, {wish!r}
print(control.ask(launcher, wish)["refused"])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.settimeout(60)
    line.connect(control._address(launcher))
    try:
        control._send(line, wish)
        print("answer", control._receive(line))
    except OSError as error:
        print(type(error).__name__)
print("floods", flush=True)
silent = []
while not select.select([sys.stdin], [], [], 0)[0]:
    silent = [*silent[-900:], socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    silent[-1].connect(control._address(launcher))
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
    orders = Heard()
    program = AS_NOBODY.format(path=sys.path, launcher=LAUNCHER, wish=PAUSE)
    with Tellers(orders, None):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == f"its socket belongs to user {os.geteuid()}\n"
                assert process.stdout.readline() in ("ConnectionResetError\n", "BrokenPipeError\n")
                assert process.stdout.readline() == "floods\n"
                assert orders.heard == []
                assert ask(LAUNCHER, PAUSE) == {"refused": "it is a test"}
                process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
        assert len(orders.heard) == 1
    assert process.returncode == 0
    assert ask(LAUNCHER, PAUSE)["refused"].startswith("its launcher does not answer: ")
