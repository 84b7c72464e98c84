"""scripts/gpu-check on an emulated GPU, and where there is none: it must be right before a GPU is at hand."""

from __future__ import annotations

import sys

import pytest

from jobs import REPOSITORY, Job, run_command

EMULATION = str(REPOSITORY / "tests/emulated")


def check(*options: str, path: str = "") -> Job:
    environment = {"PYTHON": sys.executable, "PYTHONPATH": f"{path}:{REPOSITORY}".lstrip(":")}
    line = ["scripts/gpu-check"] if not options else [sys.executable, "tests/gpu/check.py", *options]
    return run_command(line, env=environment, timeout=120.0)


def test_every_part_runs_on_an_emulated_gpu() -> None:
    job = check("--quick", path=EMULATION)
    assert job.code == 0, job.output
    assert job.left == []
    assert job.stdout.splitlines()[-1].endswith("everything ran and passed"), job.output
    assert "Emulated GPU" in job.stdout


def test_without_a_gpu_every_part_says_so() -> None:
    if _has_cupy():
        pytest.skip("this machine has CuPy")
    job = check()
    assert job.code == 0, job.output
    table = job.stdout.rpartition("=" * 100)[2]
    assert "No module named 'cupy'" in table
    assert table.count("not run") >= 8
    assert "FAILED" not in table
    assert "speed of kernels" in table.splitlines()[-1]


def _has_cupy() -> bool:
    import importlib.util

    return importlib.util.find_spec("cupy") is not None
