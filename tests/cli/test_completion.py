"""Tab completion, in a real bash; of the ids of jobs: test_ps.py."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY, run_command
from mpitrain.cli import changing, kill, top

MPITRAIN = [sys.executable, "-m", "mpitrain"]
PATHS = os.environ.get("PYTHONPATH", str(REPOSITORY))
# Bash calls the function with these variables when somebody presses Tab.
ASK = """
eval "$(mpitrain completion bash)"
for line; do
    COMPREPLY=() COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9
    read -ra COMP_WORDS <<<"$line"
    _python_argcomplete mpitrain
    echo ${COMPREPLY[@]}
done
"""


def completed(folder: Path, *lines: str) -> list[set[str]]:
    """The words that bash offers for each line."""
    pytest.importorskip("argcomplete", reason="needs argcomplete: pip install 'mpitrain[completion]'")
    (folder / "mpitrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m mpitrain "$@"\n')
    (folder / "mpitrain").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": PATHS}
    job = run_command(["bash", "-c", ASK, "ask", *lines], cwd=folder, env=env)
    assert job.code == 0, job.output
    return [set(line.split()) for line in job.stdout.splitlines()]


def test_words(tmp_path: Path) -> None:
    lines = ("mpitrain che", "mpitrain run --re", "mpitrain completion f")
    expected = [{"check-cluster", "checkpoint"}, {"--recover"}, {"fish"}]
    assert completed(tmp_path, *lines) == expected


@pytest.mark.parametrize("command", [kill, top])
def test_the_id_of_a_job_is_completed_by_those_that_run_here(command: object) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    completers = {action.dest: getattr(action, "completer", None) for action in parser._actions}
    assert completers["job"] is changing.ids_here


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_of_each_shell(shell: str) -> None:
    pytest.importorskip("argcomplete", reason="needs argcomplete: pip install 'mpitrain[completion]'")
    job = run_command([*MPITRAIN, "completion", shell], env={"PYTHONPATH": PATHS})
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
