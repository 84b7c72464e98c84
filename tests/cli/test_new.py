"""`mpitrain new`: the project that it writes works, and nothing is overwritten."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jobs import run_command
from mpitrain.cli import main


def test_the_job_script_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On 3 ranks; a second run continues from the checkpoint of the first, on 2 ranks."""
    project = tmp_path / "my project"
    assert main(["new", str(project)]) == 0
    assert f"cd '{project}'" in capsys.readouterr().out
    assert (project / "README.md").read_text().startswith("# my project\n")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/mpitrain"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mpitrain "$@"\n')
    command.chmod(0o755)
    text = (project / "train.py").read_text()
    sizes = "NUM_EPOCHS = 4000, 64, 10"
    assert sizes in text
    (project / "train.py").write_text(text.replace(sizes, "NUM_EPOCHS = 250, 64, 5"))
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    job = run_command([str(project / "job.sh"), "-n", "3", "--hosts", "localhost"], cwd=tmp_path, env=env)
    assert job.code == 0, job.output
    assert "step 20: mean squared error 16.7765" in job.stdout
    (project / "train.py").write_text(text.replace(sizes, "NUM_EPOCHS = 250, 64, 6"))
    job = run_command([str(project / "job.sh"), "-n", "2", "--hosts", "localhost"], cwd=tmp_path, env=env)
    assert job.code == 0, job.output
    assert "step 24" in job.stdout and "step 1/" not in job.stdout
    assert job.left == []


def test_the_folder_that_one_is_in_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "."]) == 0
    assert "cd" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "job.sh", "train.py"]


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("mine\n")
    assert main(["new", str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty: it has notes; name a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert main(["new", str(tmp_path / "notes")]) == 2
    assert "cannot be written: File exists; name another folder" in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "mine\n"
