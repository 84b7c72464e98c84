"""A process on a host that no longer hears its launcher ends, whatever its main thread waits for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.launch import connections
from mpitrain.launch.connections import connect
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


def test_workers_of_a_launcher_that_has_fallen_silent() -> None:
    """Their host notices it, also if they run for ever."""
    wish = {"silence_seconds": 1.0, "folder": "/", "command": ["sleep", "600"], "variables": [{"PATH": "/bin"}]}
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0, modules=_MODULES)
    until(lambda: connection.flush() or connection.process.poll() is not None)
    assert connection.process.poll() == 0
    connection.hang_up()
    connection.leave()
