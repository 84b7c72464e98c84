"""`mpitrain runs`: what records say, in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from records_made import make_record

from jobs import HANG_SECONDS, clean_environment
from mpitrain.cli import main

EVALUATED = ((10, 0.5), (20, 0.75), (30, 0.7))
ROWS = [{"step": step, "loss": 2.0 / step, "test accuracy": accuracy} for step, accuracy in EVALUATED]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with records in `runs`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_record(tmp_path / "runs/old", ROWS, steps=30, started=1000.0, first_started=1000.0, ended=4725.0)
    make_record(
        tmp_path / "runs/new/second", ROWS[:2], job="5e6f7a8b", steps=9000, first_started=2000.0, ended=2007.0,
        end="rank 1 on lab1 failed: ValueError: bang\x1b[2J", arguments=["--lr", "0.2"],
    )  # fmt: skip
    return tmp_path


LINES = [
    "JOB       STATE   STEP        TOOK     BEST                FOLDER           SCRIPT",
    "5e6f7a8b  failed  20 / 9,000  0:00:07  test accuracy 0.75  runs/new/second  train.py --lr 0.2",
    "          rank 1 on lab1 failed: ValueError: bang [2J",
    "1a2b3c4d  done    30 / 30     1:02:05  test accuracy 0.75  runs/old         train.py --lr 0.1",
]


def test_the_youngest_run_comes_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines() == LINES
    assert main(["runs", "--last", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 runs; --last 2 lists all"
    with (folder / "runs/old/metrics.jsonl").open("a") as rows:  # what is known of the others is not read again
        rows.write('{"step": 40, "loss": 0.0, "test accuracy": 0.9375}\n')
    assert main(["runs", "runs/old", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_runs"] == 1
    [run] = answer["runs"]
    assert run["best"] == {"name": "test accuracy", "value": 0.9375, "step": 40}
    assert (run["job"], run["folder"], run["state"]) == ("1a2b3c4d", str(folder / "runs/old"), "done")


def test_a_terminal_of_80_columns(folder: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "mpitrain", "runs"]
    environment = clean_environment({"XDG_CACHE_HOME": str(folder / "cache")})
    done = subprocess.run(command, stdout=theirs, cwd=folder, env=environment, timeout=HANG_SECONDS, check=False)
    os.close(theirs)
    lines = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    assert done.returncode == 0
    assert lines == [line if len(line) <= 80 else f"{line[:79]}…" for line in LINES]


def test_nothing_to_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    assert main(["runs", "empty"]) == 1
    assert capsys.readouterr().err == "mpitrain runs: there is no record of a run in empty\n"
    assert main(["runs", "missing"]) == 2
    assert "there is no folder missing; name the folders that mpitrain.writers.JsonLines was given" in (
        capsys.readouterr().err
    )
