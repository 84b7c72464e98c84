"""Tab completion, in a real bash."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY, run_command, until

MPITRAIN = [sys.executable, "-m", "mpitrain"]

# Bash calls the function with these variables when somebody presses Tab.
ASK = """
eval "$(mpitrain completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<<"$1"
_python_argcomplete mpitrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str, folder: Path) -> set[str]:
    pytest.importorskip("argcomplete", reason="needs argcomplete: pip install 'mpitrain[completion]'")
    (folder / "mpitrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m mpitrain "$@"\n')
    (folder / "mpitrain").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))}
    job = run_command(["bash", "-c", ASK, "ask", line], cwd=folder, env=env)
    assert job.code == 0, job.output
    return {word.strip() for word in job.stdout.splitlines()}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mpitrain che", {"check-cluster", "checkpoint"}),
        ("mpitrain run --re", {"--restarts", "--recover", "--resume"}),
        ("mpitrain completion f", {"fish"}),
        ("mpitrain cluster te", {"teardown"}),
    ],
)
def test_words(line: str, words: set[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == words


def test_the_id_of_a_job(tmp_path: Path) -> None:
    script = f"wait-{secrets.token_hex(4)}.py"
    (tmp_path / script).write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(3600)\n")
    answers: dict[str, set[str]] = {}
    listed: list[str] = []

    def look(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "begun").exists)
        listed.append(run_command([*MPITRAIN, "ps", "--hosts", "localhost", "--json"], cwd=tmp_path).stdout)
        for command in ("kill", "tell", "top"):
            answers[command] = completed(f"mpitrain {command} ", tmp_path)
        os.kill(process.pid, signal.SIGINT)

    job = run_command([*MPITRAIN, "run", "-n", "1", "--hosts", "localhost", script], cwd=tmp_path, during=look)
    assert job.left == []
    (own,) = [one["job"] for one in json.loads(listed[0])["jobs"] if script in one["script"]]
    assert all(own in words for words in answers.values()), answers
    assert {"pause", "resume", "save", "stop", "rate", "set", "stacks", "kill"} <= answers["tell"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_of_each_shell(shell: str) -> None:
    pytest.importorskip("argcomplete", reason="needs argcomplete: pip install 'mpitrain[completion]'")
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))}
    job = run_command([*MPITRAIN, "completion", shell], env=env)
    assert job.code == 0, job.output
    assert "mpitrain" in job.stdout
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=job.stdout, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_without_argcomplete(tmp_path: Path) -> None:
    (tmp_path / "argcomplete.py").write_text("raise ImportError('it is not there')")
    job = run_command([*MPITRAIN, "completion", "bash"], env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})
    assert job.code == 2
    assert "-m pip install 'mpitrain[completion]'" in job.stderr
