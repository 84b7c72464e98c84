"""`mpitrain doctor` on this machine and on one without mpi4py, and its report on made-up findings."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from jobs import REPOSITORY, run_command
from mpitrain.cli.doctor import report_text
from mpitrain.diagnostics import limits
from mpitrain.diagnostics.finding import Finding


def test_this_machine() -> None:
    job = run_command([sys.executable, "-m", "mpitrain", "doctor", "--json"], timeout=90.0)
    report = json.loads(job.stdout)
    fails = [finding for finding in report["findings"] if finding["level"] == "fail"]
    assert (job.code, fails) == (0, []), job.output
    assert report["facts"]["mpi"]["hello_sizes"] == [2, 2]
    assert report["facts"]["mpi"]["library"]["vendor"] == "mpich"
    assert job.left == []


def test_without_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("raise ImportError('there is no mpi4py here')")
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    job = run_command([sys.executable, "-m", "mpitrain", "doctor"], timeout=90.0, env=paths)
    assert job.code == 1, job.output
    assert job.stderr == ""
    first = job.stdout.splitlines()[2]
    assert first.startswith("FAIL  "), job.output
    assert "there is no mpi4py here" in job.stdout
    assert f"$ {sys.executable} -m pip install mpi4py mpich" in job.stdout


def test_report_wraps_text_and_never_commands() -> None:
    finding = Finding("warn", "found " * 30, "because " * 30, "run " * 40)
    text = report_text("here", [finding], [limits.collect()], width=80)
    lines = text.splitlines()
    assert lines[0] == "here: 0 failed, 1 warnings"
    assert [line for line in lines if len(line) > 80] == ["      $ " + "run " * 40]


def test_report_without_findings() -> None:
    assert report_text("here", [], [limits.collect()], width=80).startswith("here: nothing is wrong\n")


def test_gpus(tmp_path: Path) -> None:
    """Emulated ones; two ranks find the ways between them."""
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    env = {"PYTHONPATH": paths, "EMULATED_GPUS": "2", "XDG_CACHE_HOME": str(tmp_path)}
    job = run_command([sys.executable, "-m", "mpitrain", "doctor", "--json"], timeout=90.0, env=env)
    found = json.loads(job.stdout)["facts"]["gpu"]
    assert (found["driver"], found["runtime"]) == (13000, 13000), job.output
    assert [device[0] for device in found["devices"]] == ["Emulated GPU"] * 2
    assert found["transports_error"] == ""
    assert {name: bool(why) for name, why in found["transports"].items()} == {
        "aware": False,
        "nccl": True,
        "peer": False,
        "staged": False,
    }
    assert "CuPy finds no NCCL" in found["transports"]["nccl"]
    assert found["choice"].startswith("below 512 KiB: ")
    assert job.left == []
