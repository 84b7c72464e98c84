"""What a job whose ranks have each trained a model of their own says at its end."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from jobs import run_job

pytest.importorskip("torch", reason="PyTorch is not installed")

SECONDS = 300.0
PROGRAM = """
import mpitrain.torch
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("BACKEND")
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
LINE = "mpitrain: 2 ranks have each trained a model of their own: from equal parameters, an optimizer of 33 numbers"
IGNITE = "import ignite.distributed as idist\nfrom torch"


def end_of(backend: str, wrapped: str = "model", between: str = "pass") -> int:
    """How often the job says the line."""
    source = PROGRAM.replace("BACKEND", backend).replace("WRAPPED", wrapped).replace("BETWEEN", between)
    job = run_job(2, source.replace("from torch", IGNITE) if "idist" in wrapped else source, timeout=SECONDS)
    assert job.code == 0, str(job)
    return job.stdout.count(LINE)


@pytest.mark.parametrize("backend", ["mpitrain", "gloo"])
def test_the_line_comes_once(backend: str) -> None:
    assert end_of(backend) == 1


@pytest.mark.parametrize(
    ("wrapped", "between"),
    [("DistributedDataParallel(model)", "pass"), ("model", "dist.all_reduce(torch.ones(100))")],
    ids=["wrapped", "exchanged by hand"],
)
def test_no_line_of_gloo(wrapped: str, between: str) -> None:
    assert end_of("gloo", wrapped, between) == 0


@pytest.mark.skipif(find_spec("ignite") is None, reason="pytorch-ignite is not installed")
def test_auto_model_of_ignite_wraps_nothing() -> None:
    assert end_of("mpitrain", "idist.auto_model(model)") == 1


def test_a_program_may_have_closed_its_output() -> None:
    source = PROGRAM.replace("BACKEND", "mpitrain").replace("WRAPPED", "model").replace("BETWEEN", "pass")
    job = run_job(2, f"{source}\nimport sys; sys.stdout.close()", timeout=SECONDS)
    assert (job.code, job.stderr) == (0, ""), str(job)
