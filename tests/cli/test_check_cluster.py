"""`mpitrain check-cluster`: what needs no nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs import HANG_SECONDS


def say(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpitrain", "check-cluster", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--levle", "quick"], "unknown argument --levle; did you mean --level?"),
        (["--level", "fast"], "invalid choice: 'fast'"),
        (["--json"], "not allowed with argument"),
        (["--only", "SSH99"], "there is no check SSH99"),
        (["-i", "missing"], "missing: there is no such file"),
    ],
)
def test_wrong_use(tmp_path: Path, words: list[str], says: str) -> None:
    """2 for people; for Nagios, where 2 is CRITICAL, UNKNOWN and one line."""
    done = say(tmp_path, "--nagios", *words)
    assert done.returncode == 3
    assert done.stdout.startswith("MPITRAIN UNKNOWN - ") and says in done.stdout
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
    if words != ["--json"]:
        done = say(tmp_path, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
