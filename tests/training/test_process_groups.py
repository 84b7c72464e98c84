"""Process groups of PyTorch: which backend one has for which the program names none, and what a job says at its end
whose ranks have each trained a model of their own."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from jobs import Job, run_job

pytest.importorskip("torch", reason="PyTorch is not installed")

SECONDS = 300.0
PROGRAM = """
import sys
import mpitrain.torch
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(BACKEND)
# One write a line: lines of two ranks are not torn then.
print(f"{dist.get_backend_config()} of {dist.get_rank()}\\n", end="", flush=True)
torch.manual_seed(0)
model = torch.nn.Linear(10, 3)
model = WRAPPED
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = torch.Generator().manual_seed(dist.get_rank())
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 10, generator=own)).square().mean().backward()
    BETWEEN
    optimizer.step()
dist.destroy_process_group()
"""
LINE = "mpitrain: 2 ranks have each trained a separate model: from equal parameters, an optimizer of 33 numbers"
IGNITE = "import ignite.distributed as idist\nfrom torch"


def train(backend: str = "", wrapped: str = "model", between: str = "pass") -> Job:
    source = PROGRAM.replace("BACKEND", repr(backend) if backend else "")
    source = source.replace("WRAPPED", wrapped).replace("BETWEEN", between)
    job = run_job(2, source.replace("from torch", IGNITE) if "idist" in wrapped else source, timeout=SECONDS)
    assert job.code == 0, str(job)
    return job


def test_a_group_without_a_name_is_ours_and_the_line_comes_once() -> None:
    job = train()
    ours = sorted(line[-1] for line in job.stdout.splitlines() if "cpu:mpitrain" in line and " of " in line)
    assert ours == ["0", "1"], str(job)
    assert "gloo" not in job.stdout.partition(LINE)[0] + job.stderr  # the line has the word
    assert job.stdout.count(LINE) == 1


@pytest.mark.parametrize(
    ("wrapped", "between", "lines"),
    [
        ("DistributedDataParallel(model)", "pass", 0),
        pytest.param("model", "dist.all_reduce(torch.ones(100))", 0, marks=pytest.mark.nightly),
        pytest.param("model", "pass", 1, marks=pytest.mark.nightly),
    ],
    ids=["wrapped", "exchanged by hand", "on their own"],
)
def test_a_program_that_names_gloo(wrapped: str, between: str, lines: int) -> None:
    """Nobody is told that it is gloo. The line comes only where nothing is exchanged."""
    job = train("gloo", wrapped, between)
    assert job.stdout.count(LINE) == lines
    assert "begins a process group of gloo" not in job.stdout + job.stderr


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ignite") is None, reason="pytorch-ignite is not installed")
def test_auto_model_of_ignite_wraps_nothing() -> None:
    assert train("mpitrain", "idist.auto_model(model)").stdout.count(LINE) == 1


@pytest.mark.nightly
def test_a_program_may_have_closed_its_output() -> None:
    job = train("mpitrain", between="step == 19 and sys.stdout.close()")
    assert job.stderr == "", str(job)


def test_backends_with_gloo() -> None:
    from mpitrain.torch.rendezvous import _has_gloo

    assert all(map(_has_gloo, ["gloo", "GLOO", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"]))
    assert not any(map(_has_gloo, ["mpitrain", "nccl", "cpu:mpitrain,cuda:gloo"]))


OF_A_LIBRARY = """
import mpitrain.torch
from accelerate import Accelerator
import torch

accelerator = Accelerator(cpu=True)
print(accelerator.reduce(torch.ones(1)).item())
accelerator.end_training()
"""


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_one_line_names_a_library_that_begins_gloo() -> None:
    job = run_job(2, OF_A_LIBRARY, timeout=SECONDS)
    assert job.code == 0, str(job)
    assert job.stdout.count("2.0") == 2, str(job)
    assert (job.stdout + job.stderr).count("accelerate begins a process group of gloo") == 1, str(job)
