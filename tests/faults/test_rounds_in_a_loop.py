"""A loop of a user's own in rounds, in which a rank dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from faults.outcome import failed
from jobs import run_command

pytest.importorskip("torch", reason="PyTorch is not installed")

SCRIPT = """
import os, sys
import torch
import mpitrain as mt
import mpitrain.torch

world, place = mt.init(), sys.argv[1]
x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = mpitrain.torch.prepare(model, optimizer, [x] * 30, strategy=mt.LocalSGD(5))
for number, batch in enumerate(data, 1):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    if world.rank == 1 and number == {"round": 12, "outer step": 15}[place]:
        os.kill(os.getpid(), 9)
    optimizer.step()
mpitrain.torch.end_round(model)
"""


@pytest.mark.parametrize("place", ["round", pytest.param("outer step", marks=pytest.mark.nightly)])
def test_a_rank_that_is_killed(tmp_path: Path, place: str) -> None:
    """In the middle of a round, and before the outer step."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = run_command([sys.executable, "-m", "mpitrain", "run", "-n", "3", str(script), place], timeout=100.0)
    failed(job, "mpitrain: rank 1 on ", "was killed by signal 9")
