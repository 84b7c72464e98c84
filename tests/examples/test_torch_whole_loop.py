"""examples/torch_whole_loop.py: the same numbers on any number of ranks, said once, also over a break."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY, mpiexec, run_command

pytest.importorskip("torch", reason="PyTorch is not installed")
SCRIPT = REPOSITORY / "examples/torch_whole_loop.py"


def lines(num_ranks: int, *options: str) -> list[tuple[int, float, float]]:
    """Epoch, loss and accuracy of each line."""
    job = run_command([*mpiexec(num_ranks), sys.executable, str(SCRIPT), *options], timeout=100)
    assert job.code == 0, job.output
    found = re.findall(r"epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+)", job.stdout)
    assert len(found) == len(job.stdout.splitlines()), job.output
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in found]


def test_a_break_and_another_number_of_ranks_change_nothing(tmp_path: Path) -> None:
    alone = lines(1)
    assert [epoch for epoch, _, _ in alone] == [1, 2, 3]
    assert alone[-1][2] > 0.85
    checkpoint = ["--checkpoint", str(tmp_path / "state.pt")]
    resumed = lines(1, *checkpoint, "--epochs", "1") + lines(2, *checkpoint)
    assert [epoch for epoch, _, _ in resumed] == [1, 2, 3]
    for (_, loss, accuracy), (_, expected_loss, expected_accuracy) in zip(resumed, alone, strict=True):
        # float32: sums in another order.
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert accuracy == pytest.approx(expected_accuracy, abs=0.003)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
