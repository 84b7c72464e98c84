"""scripts/gpu-check on an emulated GPU, and where there is none: it must be right before a GPU is at hand."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from jobs import REPOSITORY, Job, run_command

EMULATION = str(REPOSITORY / "tests/emulated")
# Of its parts, the one that starts ranks, and shows results of its own in the table.
CHEAP = "speed of allreduce, 2 ranks"


def check(command: list[str], path: str = "", seconds: float = 120.0) -> Job:
    environment = {"PYTHON": sys.executable, "PYTHONPATH": f"{path}:{REPOSITORY}".lstrip(":")}
    return run_command(command, env=environment, timeout=seconds)


@pytest.mark.parametrize(
    "parts", [[CHEAP], pytest.param([], marks=pytest.mark.nightly)], ids=["one part", "every part"]
)
def test_it_runs_on_an_emulated_gpu(parts: list[str]) -> None:
    """Its limits are those of a machine that is ten times slower, and so are those here."""
    job = check([sys.executable, "tests/gpu/check.py", "--quick", *parts], EMULATION, seconds=500.0)
    assert job.code == 0, job.output
    assert job.left == []
    table = job.stdout.rpartition("=" * 100)[2]
    assert table.splitlines()[-1].endswith("everything ran and passed"), job.output
    assert "Emulated GPU" in table
    assert CHEAP in table and "\n  " in table.partition(CHEAP)[2]


def test_without_a_gpu_every_part_says_so() -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("this machine has CuPy")
    job = check(["scripts/gpu-check"])
    assert job.code == 0, job.output
    table = job.stdout.rpartition("=" * 100)[2]
    assert "No module named 'cupy'" in table
    assert table.count("not run") >= 8
    assert "FAILED" not in table
    assert "speed of kernels" in table.splitlines()[-1]
