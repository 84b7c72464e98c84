"""examples/torch_trainer.py: the same numbers on any number of ranks, also over a break."""

from __future__ import annotations

import re

import pytest
from torch_programs import Printed

pytest.importorskip("torch", reason="PyTorch is not installed")


def evaluations(lines: list[str]) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by step."""
    pattern = r"^step (\d+): evaluation loss ([\d.]+), test accuracy ([\d.]+)$"
    return {
        int(step): (float(loss), float(accuracy))
        for step, loss, accuracy in re.findall(pattern, "\n".join(lines), re.M)
    }


def test_a_break_and_another_number_of_ranks_change_nothing(printed: Printed) -> None:
    alone = evaluations(printed.alone["trainer"])
    assert list(alone) == [12, 24, 36]  # 1,442 samples in batches of 128
    assert alone[36][1] > 0.85
    resumed = evaluations(printed.alone["begun"]) | evaluations(printed.together["resumed"])
    assert list(resumed) == [12, 24, 36]
    for step, (loss, accuracy) in resumed.items():
        # float32: sums in another order. Four digits are printed.
        assert loss == pytest.approx(alone[step][0], abs=2e-4)
        assert accuracy == pytest.approx(alone[step][1], abs=0.003)
    place = printed.folder / "run/checkpoints/step-00000012"
    assert f"resumed from {place} at step 12" in printed.together["resumed"]
