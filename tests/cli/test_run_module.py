"""`mpitrain run` with a module, and with `python` before the script, as other launchers are given them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY, Job, run_command

SAYS = "import sys; print(__name__, __package__ or '-', sys.argv[1:])"
BIN = Path(sys.executable).parent


def run(folder: Path, *words: str, path: str = "") -> Job:
    command = [sys.executable, "-m", "mpitrain", "run", "-n", "2", *words]
    path = path or f"{BIN}:{os.environ['PATH']}"
    return run_command(command, timeout=240.0, cwd=folder, env={"PATH": path, "PYTHONPATH": str(REPOSITORY)})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("pack/inner", "spaces/inner"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train.py", "pack/__init__.py", "pack/inner/__init__.py"):
        (tmp_path / name).touch()
    for name in ("train.py", "pack/inner/fit.py", "pack/__main__.py", "spaces/inner/fit.py", "spaces/__main__.py"):
        (tmp_path / name).write_text(SAYS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["-m", "pack.inner.fit"], "pack.inner"),
        (["-m", "pack"], "pack"),
        (["-m", "train"], "-"),
        (["python", "train.py"], "-"),
        (["python3", "-m", "pack"], "pack"),
        ([sys.executable, "train.py"], "-"),
        (["-m", "spaces.inner.fit"], "spaces.inner"),  # folders without __init__.py
        (["-m", "spaces"], "spaces"),
    ],
)
def test_it_runs(project: Path, words: list[str], package: str) -> None:
    job = run(project, *words, "--epochs", "5", "-n", "3")
    assert job.code == 0, job.output
    said = {line.partition("] ")[2] for line in job.stdout.splitlines()}
    assert said == {f"__main__ {package} ['--epochs', '5', '-n', '3']"}, job.output


def test_arguments_behind_two_dashes_are_the_modules(project: Path) -> None:
    job = run(project, "-m", "pack", "a", "--", "--show", "b")
    assert job.code == 0, job.output
    assert {line.partition("] ")[2] for line in job.stdout.splitlines()} == {"__main__ pack ['a', '--', '--show', 'b']"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "pack.missing"], "there is no module 'pack.missing' to run, neither in "),
        (["-m", "pack.inner"], "there is no module 'pack.inner' to run, neither in "),
        (["-m", "nothing.at.all"], "there is no module 'nothing.at.all' to run, neither in "),
        (["missing.py"], "there is no script 'missing.py' in "),
    ],
)
def test_what_is_not_there(project: Path, words: list[str], said: str) -> None:
    job = run(project, *words)
    assert job.code == 2
    assert said in job.stderr


def test_another_python_is_refused(project: Path) -> None:
    """The ranks would run another Python than the user has named."""
    (project / "bin").mkdir()
    (project / "bin/python").symlink_to(sys.executable)
    job = run(project, "python", "train.py", path=f"{project / 'bin'}:{os.environ['PATH']}")
    assert job.code == 2
    assert f"the ranks run {sys.executable}, but 'python' is {project / 'bin/python'}; leave out" in job.stderr
