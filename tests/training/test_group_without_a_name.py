"""Which backend a process group has for which the program names none, and who is told of gloo."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from jobs import run_job

SECONDS = 300.0
# One write a line: lines of two ranks are not torn then.
OURS = r"""
import mpitrain.torch
import torch, torch.distributed as dist

dist.init_process_group()
x = torch.ones(2)
dist.all_reduce(x)
print(f"{dist.get_backend_config()} {dist.get_rank()} {x.tolist()}\n", end="")
dist.destroy_process_group()
"""
OF_A_LIBRARY = """
import mpitrain.torch
from accelerate import Accelerator
import torch

accelerator = Accelerator(cpu=True)
print(accelerator.reduce(torch.ones(1)).item())
accelerator.end_training()
"""
NAMED = "import mpitrain.torch, torch.distributed as d; d.init_process_group('gloo'); d.destroy_process_group()"


def test_is_ours_on_cpus() -> None:
    job = run_job(2, OURS, timeout=SECONDS)
    assert job.code == 0, str(job)
    lines = sorted(line for line in job.stdout.splitlines() if line.endswith("[2.0, 2.0]"))
    assert len(lines) == 2, str(job)
    assert all("cpu:mpitrain" in line for line in lines), str(job)
    assert "gloo" not in job.stdout + job.stderr


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_one_line_names_a_library_that_begins_gloo() -> None:
    job = run_job(2, OF_A_LIBRARY, timeout=SECONDS)
    assert job.code == 0, str(job)
    assert job.stdout.count("2.0") == 2, str(job)
    assert (job.stdout + job.stderr).count("accelerate begins a process group of gloo") == 1, str(job)


def test_no_line_where_the_program_names_gloo_itself() -> None:
    job = run_job(2, NAMED, timeout=SECONDS)
    assert job.code == 0, str(job)
    assert "gloo" not in job.stdout + job.stderr, str(job)
