"""examples/torch_prepare.py: on two ranks what it computes without its lines of mpitrain, to rounding."""

from __future__ import annotations

import re
import sys

import pytest
from torch_programs import Printed

from jobs import REPOSITORY, run_command

pytest.importorskip("torch", reason="PyTorch is not installed")
SCRIPT = REPOSITORY / "examples/torch_prepare.py"


def losses(lines: list[str]) -> tuple[float, float]:
    """Test loss and accuracy, said once."""
    ((loss, accuracy),) = re.findall(r"^test loss ([\d.]+), test accuracy ([\d.]+)$", "\n".join(lines), re.M)
    return float(loss), float(accuracy)


def test_two_ranks_compute_what_one_process_does(printed: Printed) -> None:
    lines = SCRIPT.read_text().splitlines()
    theirs = [line for line in lines if "mpitrain.torch" in line and not line.startswith((" " * 5, '"'))]
    assert len(theirs) == 2
    plain = "\n".join(line for line in lines if line not in theirs).replace("mpitrain.init().is_root", "True")
    # datasets.py is found beside the script, and needs no more of mpitrain than its errors.
    path = {"PYTHONPATH": f"{REPOSITORY}:{SCRIPT.parent}"}
    alone = run_command([sys.executable, "-c", plain, "--epochs", "2"], timeout=100, env=path)
    assert alone.code == 0, alone.output
    loss, accuracy = losses(alone.stdout.splitlines())
    assert accuracy > 0.8
    # float32, 24 steps: sums in another order.
    assert losses(printed.together["prepare"]) == (pytest.approx(loss, rel=1e-5), pytest.approx(accuracy, abs=0.003))
