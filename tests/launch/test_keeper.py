"""A keeper by itself: it answers no other user, waits for an heir of a lost launcher, and ends when nobody needs it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import holding
import pytest
from attempting import wait_for
from holding import Line, content, is_gone, memory, new_name

from jobs import HANG_SECONDS, until
from keeping import keeper
from mpitrain.errors import LaunchError
from mpitrain.launch import keeper as keeper_module
from mpitrain.launch.agents import Agents
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.keeper import SetAside
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import KeeperLine, drop
from mpitrain.launch.processes import launcher_name

line = holding.line  # a fixture: pytest finds it by this name

AS_NOBODY = """
import os, select, socket, sys
sys.path[:] = {path}
from mpitrain.launch.kept import KeeperLine, Kept
from mpitrain.watching.sockets import receive, send
os.setuid(65534)
{does}
"""
ASKS = """
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(chr(0) + sys.argv[1])
try:
    send(line, {"give": "1/state"})
    print(receive(line))
except OSError as error:
    print(type(error).__name__)
"""
SERVES = """
kept = Kept(sys.argv[1])
print("there", flush=True)
while sys.stdin not in select.select([sys.stdin, kept], [], [])[0]:
    kept.look()
"""


def test_nonsense_ends_only_its_own_line(line: Line) -> None:
    with keeper() as name:
        for nonsense in (b"no json", b"[]", b"{}", b'{"give": {}}'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                other.connect("\0" + name)
                other.settimeout(60)
                other.send(nonsense)
                assert other.recv(100) == b""
        assert line(name, "try").names() == []


@contextlib.contextmanager
def nobody(does: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    command = [sys.executable, "-c", AS_NOBODY.format(path=sys.path, does=does), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_another_user_gets_nothing(line: Line) -> None:
    """Anybody may connect to such a socket."""
    with keeper() as name:
        own = line(name, "try")
        own.keep("1/state", [memory(b"secret")])
        with nobody(ASKS, name) as process:
            assert process.communicate(timeout=HANG_SECONDS)[0] in ("ConnectionResetError\n", "BrokenPipeError\n")
        (back,) = own.give("1/state")
        assert content(back) == b"secret"
        os.close(back)


def test_the_keeper_of_another_user_is_refused() -> None:
    """It would get the state of the training."""
    name = new_name()
    with nobody(SERVES, name) as process:
        assert process.stdout.readline() == "there\n"
        with pytest.raises(PermissionError, match="the keeper belongs to user 65534"):
            KeeperLine(name, "try")


class Lost:
    """A keeper on this machine that holds a memory and an estate, and is about to lose its launcher, with its agent.

    Raises OSError if the keeper has ended meanwhile.
    """

    def __init__(self, keep_seconds: float = 900.0, silence_seconds: float = 0.0, launcher: str = "") -> None:
        self.name = new_name()
        self.connection: Connection = connect("here", True, {"silence_seconds": silence_seconds}, time.monotonic())
        self._opened = contextlib.ExitStack()
        self._opened.callback(self._end)
        estate = {"tries": ["one", "two"], "launcher": launcher}
        wish = {"name": self.name, "launcher": "l", "keep_seconds": keep_seconds, "is_new": True, "estate": estate}
        self.connection.send({"memory": {"number": 1, **wish}})
        try:
            wait_for(self.connection, "memory", lambda answer: "ready" in answer)
            self.line = self._opened.enter_context(contextlib.closing(KeeperLine(self.name)))
            self.line.keep("1/state", [memory(b"x")])
            until(lambda: self.line.estate()[1])
        except OSError:
            self.close()
            raise

    def is_lost(self) -> bool:
        """True if the keeper has lost its launcher."""
        return "lost_ms" in self.line.estate()[0]

    def close(self) -> None:
        self._opened.close()

    def _end(self) -> None:
        self.connection.process.kill()
        self.connection.hang_up()
        self.connection.close(60)
        drop(self.name)


@pytest.mark.parametrize("has_goodbye", [True, False])
def test_a_goodbye_ends_all_and_so_does_a_loss_with_nothing_to_keep(has_goodbye: bool) -> None:
    with contextlib.closing(Lost()) as lost:
        if has_goodbye:
            lost.connection.send({"bye": 1})
        else:
            lost.line.keep_only([], 1)
            lost.connection.hang_up()
        until(lambda: is_gone(lost.name))


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_lost_launcher(is_silent: bool) -> None:
    """What the keeper holds stays for a while, which is short here. The keeper says for how long."""
    for seconds in (1, 4, 16, 64):  # the machine may be too slow for the first ones
        with (
            contextlib.suppress(OSError),
            contextlib.closing(Lost(2 * seconds, silence_seconds=seconds if is_silent else 0)) as lost,
        ):
            if not is_silent:
                lost.connection.hang_up()
            until(lost.is_lost)
            about, _ = lost.line.estate()
            assert about["until_ms"] - about["lost_ms"] == 2000 * seconds
            until(lambda name=lost.name: is_gone(name))
            return
    pytest.fail("the keeper has always ended before it could be asked")


def test_an_agent_that_is_killed_is_no_lost_launcher() -> None:
    """While the launcher lives on its host, the keeper waits for another agent."""
    with contextlib.closing(Lost(1.0, launcher=launcher_name(os.getpid()))) as lost:
        lost.connection.process.kill()
        time.sleep(4.0)
        assert not lost.is_lost()
        assert lost.line.names() == ["1/state"]


def test_an_heir_takes_over() -> None:
    """One of two heirs gets what is kept. An heir that starts no attempt says no goodbye. The next heir can drop it
    all.
    """
    with contextlib.closing(Lost()) as lost:
        lost.connection.hang_up()
        until(lost.is_lost)
        lost.line.lead("another one")
        estate = {"tries": ["one", "two"], "launcher": "here 1 1", "own": "there"}
        name = new_name()
        taken_over = pytest.raises(LaunchError, match="taken over: here: another one continues with this job")
        with taken_over, Agents("here") as agents, Keepers(agents, name, estate) as late:
            late.adopt({"here": lost.name}, "heir")
        lost.line.close()
        with pytest.raises(LaunchError), Agents("here") as agents, Keepers(agents, name, estate) as heir:
            heir.adopt({"here": lost.name}, "heir")
            until(lambda: is_gone(lost.name))
            with contextlib.closing(KeeperLine(name)) as line:
                # The estate names the new launcher before any try begins.
                assert '"launcher": "here 1 1", "own": "here"' in line.estate()[1]
            heir.begin(["here"], "three")
            heir.settle()
            raise LaunchError("no attempt can be started")
    line = KeeperLine(name)
    until(lambda: "lost_ms" in line.estate()[0])
    (descriptor,) = line.give("1/state")
    assert content(descriptor) == b"x"
    assert '"tries": ["one", "two", "three"]' in line.estate()[1]
    line.drop()
    line.close()


def test_an_heir_of_a_keeper_that_is_gone() -> None:
    gone = pytest.raises(LaunchError, match=r"here: its keeper has just ended .* or has dropped it")
    with gone, Agents("here") as agents, Keepers(agents, new_name(), {"tries": ["one"]}) as heir:
        heir.adopt({"here": new_name()}, "heir")


UP, LAUNCHER, OTHER = "1e9 1.0", f"7 (a b) S {'0 ' * 18}55 0", f"7 (a b) S {'0 ' * 18}56 0"


@pytest.mark.parametrize(
    ("own", "lines", "is_sure"),
    [
        ("a", [UP, LAUNCHER, "1"], True),  # the launcher lives: the job continues without this host
        ("a", [UP, "0"], True),  # neither it nor a keeper is there: the job is over
        ("a", [UP, OTHER, "0"], True),  # another process has its number
        ("a", [UP, "1"], False),  # the launcher was lost, and its keeper waits too
        ("c", [UP, "0"], False),  # the launcher's host has no ranks, so it never had a keeper
        ("a", ["20.0 1.0", "0"], False),  # that host has lost its power
    ],
)
def test_what_a_keeper_that_was_cut_off_makes_of_the_answer(own: str, lines: list[str], is_sure: bool) -> None:
    estate = {"own": own, "launcher": "host 7 55", "places": [["a", 1, []], ["b", 1, []]]}
    assert SetAside("keeper", json.dumps(estate), 60.0)._judge(lines) is is_sure


def test_a_launcher_s_host_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_FIRST_SECONDS", 0.0)
    aside = SetAside("keeper", json.dumps({"own": "no-such-host.invalid", "launcher": "host 7 55"}), 60.0)
    until(lambda: aside.is_sure() or aside._ssh is not None)
    until(lambda: aside.is_sure() or aside._ssh is None)
    assert not aside.is_sure()
