"""A keeper that has lost its launcher waits for an heir, gives it what it holds, and then ends."""

from __future__ import annotations

import contextlib
import secrets
import time

import pytest
from holding import content, is_gone, memory

from jobs import until
from mpitrain.errors import LaunchError
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.keepers import KEEPER, Keepers
from mpitrain.launch.kept import KeeperLine


class Lost:
    """A keeper on this machine that holds a memory and an estate, and is about to lose its launcher.

    Raises OSError if the keeper has ended meanwhile.
    """

    def __init__(self, keep_seconds: float, silence_seconds: float = 0.0) -> None:
        self.name = f"mpitrain-test-{secrets.token_hex(8)}"
        wish = {"keeper": self.name, "silence_seconds": silence_seconds, "keep_seconds": keep_seconds}
        self.connection: Connection = connect("here", True, wish, time.monotonic(), KEEPER)
        self._opened = contextlib.ExitStack()
        self._opened.callback(self._end)
        try:
            until(lambda: self.connection.flush() or {"ready": 1} in self.connection.receive(time.monotonic()))
            self.connection.send({"estate": {"tries": ["one", "two"]}})
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
        """End the keeper."""
        self._opened.close()

    def _end(self) -> None:
        self.connection.process.kill()
        self.connection.hang_up()
        self.connection.close(60)


def test_a_goodbye_ends_all() -> None:
    with contextlib.closing(Lost(keep_seconds=900)) as lost:
        lost.connection.send({"bye": 1})
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


def test_nothing_to_keep() -> None:
    with contextlib.closing(Lost(keep_seconds=900)) as lost:
        lost.line.keep_only([], 1)
        lost.connection.hang_up()
        until(lambda: is_gone(lost.name))


def test_an_heir_takes_over() -> None:
    """One of two heirs gets what is kept. An heir that starts no try says no goodbye. The next heir can drop it all."""
    with contextlib.closing(Lost(keep_seconds=900)) as lost:
        lost.connection.hang_up()
        until(lost.is_lost)
        lost.line.claim("another one")
        estate = {"tries": ["one", "two"], "launcher": "here 1 1", "own": "there"}
        name = f"mpitrain-test-{secrets.token_hex(8)}"
        with (
            pytest.raises(LaunchError, match="taken over: here: another one goes on with this job"),
            Keepers("here", name, estate) as late,
        ):
            late.adopt({"here": lost.name}, "heir")
        lost.line.close()
        with pytest.raises(LaunchError), Keepers("here", name, estate) as heir:
            heir.adopt({"here": lost.name}, "heir")
            until(lambda: is_gone(lost.name))
            with contextlib.closing(
                KeeperLine(name)
            ) as line:  # the estate names the new launcher before any try begins
                until(lambda: '"launcher": "here 1 1", "own": "here"' in line.estate()[1])
            heir.begin(["here"], "three")
            heir.settle()
            raise LaunchError("no try can be started")
    line = KeeperLine(name)
    until(lambda: "lost_ms" in line.estate()[0])
    (descriptor,) = line.give("1/state")
    assert content(descriptor) == b"x"
    assert '"tries": ["one", "two", "three"]' in line.estate()[1]
    line.drop()
    line.close()
    for connection in (*late._parting, *heir._parting):
        assert connection.process.wait(60) == 0
