"""A fault is undone in time, whichever process is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import HANG_SECONDS, clean_environment, until
from testbed.chaos.saboteur import refusal_to_fill

# The fault makes a file, and undoing it removes the file. A test inserts the line with what happens in between.
PROGRAM = """
import os, pathlib, signal, sys, time
from testbed.chaos.saboteur import Outage
file = pathlib.Path(sys.argv[1])
outage = Outage(1, file.touch, lambda: file.unlink(missing_ok=True), SECONDS)
while not file.exists():
    time.sleep(0.01)
THEN
"""
WAIT = "while not outage.is_over():\n    time.sleep(0.01)\nprint(file.exists())"


def held(folder: Path, seconds: float, then: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    file = folder / "fault"
    source = PROGRAM.replace("SECONDS", str(seconds)).replace("THEN", then)
    command = [sys.executable, "-c", source, str(file)]
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, env=clean_environment(), stdout=pipe, stderr=pipe, text=True, timeout=HANG_SECONDS, check=False
    )
    return file, done


@pytest.mark.parametrize(
    ("seconds", "then"),
    [
        (0.3, WAIT),
        (1000.0, "outage.end()\nprint(file.exists())"),
        (1000.0, f"os.kill(outage._keeper, signal.SIGKILL)\n{WAIT}"),
    ],
    ids=["in time", "at once", "keeper killed"],
)
def test_it_is_undone(tmp_path: Path, seconds: float, then: str) -> None:
    _, done = held(tmp_path, seconds, then)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_undone_if_the_process_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """The keeper closes its output. Otherwise the pipe of `held` would wait for its end, as an ssh connection would."""
    file, done = held(tmp_path, 1000.0, f"os.kill(os.getpid(), {int(number)})")
    assert done.returncode == -number, done.stderr
    until(lambda: not file.exists(), "the fault is still in force")


def test_a_keeper_cannot_be_ended_by_a_signal_that_can_be_ignored(tmp_path: Path) -> None:
    then = "for number in (1, 2, 15):\n    os.kill(outage._keeper, number)\ntime.sleep(0.3)\nprint(file.exists())"
    _, done = held(tmp_path, 1000.0, then)
    assert done.stdout == "True\n", done.stderr


def test_what_others_need_is_not_filled(tmp_path: Path) -> None:
    for folder in ("/", "/dev/shm", "/tmp"):
        assert "which others need" in refusal_to_fill(folder)
    assert "No such file or directory" in refusal_to_fill(str(tmp_path / "absent"))


def test_a_small_disk_may_be_filled(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = (
        f"mount -t tmpfs -o size=SIZE none {tmp_path} && "
        f"{sys.executable} -c 'from testbed.chaos.saboteur import refusal_to_fill as r; print(r(\"{tmp_path}\"))'"
    )
    for size, said in (("1m", ""), ("300m", f"{tmp_path} is on a file system of 300 MiB; chaos fills at most 256 MiB")):
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script.replace("SIZE", size)],
            env=clean_environment(), capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
        )  # fmt: skip
        assert done.stdout == f"{said}\n", done.stderr
