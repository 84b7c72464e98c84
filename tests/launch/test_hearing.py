"""A process on a host that no longer hears its launcher ends, whatever its main thread waits for."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.launch import connections, keeper
from mpitrain.launch.connections import connect
from mpitrain.launch.keeper import SetAside
from mpitrain.launch.serving import _MODULES

# The main thread hangs where it never looks, as in a read of a dead share.
STUCK = """
import sys, time
from mpitrain.launch import hearing
hearing.STUCK_SECONDS = 1.0
hearing.Hearing(float(sys.argv[1]), lambda: print("last", flush=True))
time.sleep(600)
"""


@pytest.mark.parametrize("silence_seconds", [1.0, 0.0])
def test_a_main_thread_that_hangs(silence_seconds: float) -> None:
    """Silence ends the process on another host; where the launcher is, its hanging up."""
    command = [sys.executable, "-c", STUCK, str(silence_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(4):  # longer than both times
            process.stdin.write("x")
            process.stdin.flush()
            time.sleep(1.0)
            assert process.poll() is None or silence_seconds  # a busy machine may be late with a beat
        if not silence_seconds:
            process.stdin.close()
        assert process.stdout.read() == "last\n"
        assert process.wait(HANG_SECONDS) == 1


def test_a_network_that_breaks_during_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The far side has not got all of its own text, and ends."""
    monkeypatch.setattr(connections, "_BOOT", connections._BOOT.replace("signal.alarm(60)", "signal.alarm(1)"))
    monkeypatch.setattr(connections.Connection, "send", lambda *_: None)
    connection = connect("here", is_this_machine=True, wish={}, now=0.0)
    assert connection.process.wait(HANG_SECONDS) == -14
    connection.hang_up()
    connection.leave()


UP, LAUNCHER, OTHER = "1e9 1.0", f"7 (a b) S {'0 ' * 18}55 0", f"7 (a b) S {'0 ' * 18}56 0"


@pytest.mark.parametrize(
    ("own", "lines", "is_sure"),
    [
        ("a", [UP, LAUNCHER, "1"], True),  # the launcher lives: the job goes on without this host
        ("a", [UP, "0"], True),  # neither it nor a keeper is there: the job is over
        ("a", [UP, OTHER, "0"], True),  # another process has its number
        ("a", [UP, "1"], False),  # the launcher was lost, and its keeper waits too
        ("c", [UP, "0"], False),  # the launcher's host has no ranks, so it never had a keeper
        ("a", ["20.0 1.0", "0"], False),  # that host has lost its power
    ],
)
def test_what_a_keeper_that_was_cut_off_makes_of_the_answer(own: str, lines: list[str], is_sure: bool) -> None:
    estate = {"own": own, "launcher": "host 7 55", "places": [["a", 1, []], ["b", 1, []]]}
    aside = SetAside("keeper", json.dumps(estate), 60.0)
    assert aside._judge(lines) is is_sure


def test_a_launcher_s_host_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_FIRST_SECONDS", 0.0)
    aside = SetAside("keeper", json.dumps({"own": "no-such-host.invalid", "launcher": "host 7 55"}), 60.0)
    until(lambda: aside.is_sure() or aside._ssh is not None)
    until(lambda: aside.is_sure() or aside._ssh is None)
    assert not aside.is_sure()


def test_workers_of_a_launcher_that_has_fallen_silent() -> None:
    """Their host notices it, also if they run for ever."""
    wish = {
        "silence_seconds": 1.0,
        "folder": "/",
        "command": ["sleep", "600"],
        "variables": [{"PATH": "/usr/bin:/bin"}],
    }
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0, modules=_MODULES)
    until(lambda: connection.flush() or connection.process.poll() is not None)
    assert connection.process.poll() == 0
    connection.hang_up()
    connection.leave()
