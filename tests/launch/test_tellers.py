"""The launcher's socket for `mpitrain tell`: another user of the machine can connect, and is not heard."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from jobs import HANG_SECONDS
from mpitrain.launch.changes import Tellers
from mpitrain.launch.control import ask
from mpitrain.launch.orders import Orders
from mpitrain.launch.roster import launcher_name

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
    orders, launcher = Heard(), launcher_name(os.getpid())
    program = AS_NOBODY.format(path=sys.path, launcher=launcher, wish=PAUSE)
    with Tellers(orders, None):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == f"its socket belongs to user {os.geteuid()}\n"
                assert process.stdout.readline() in ("ConnectionResetError\n", "BrokenPipeError\n")
                assert process.stdout.readline() == "floods\n"
                assert orders.heard == []
                assert ask(launcher, PAUSE) == {"refused": "it is a test"}
                process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
        assert len(orders.heard) == 1
    assert process.returncode == 0
    assert ask(launcher, PAUSE)["refused"].startswith("its launcher does not answer: ")
