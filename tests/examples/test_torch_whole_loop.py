"""examples/torch_whole_loop.py: the same numbers on any number of ranks, said once, also over a break."""

from __future__ import annotations

import re

import pytest
from torch_programs import Printed

pytest.importorskip("torch", reason="PyTorch is not installed")


def numbers(lines: list[str]) -> list[tuple[int, float, float]]:
    """Epoch, loss and accuracy of each line."""
    matches = [re.fullmatch(r"epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+)", line) for line in lines]
    assert None not in matches, lines
    return [(int(match[1]), float(match[2]), float(match[3])) for match in matches if match]


def test_a_break_and_another_number_of_ranks_change_nothing(printed: Printed) -> None:
    alone = numbers(printed.alone["whole loop"])
    assert [epoch for epoch, _, _ in alone] == [1, 2, 3]
    assert alone[-1][2] > 0.85
    resumed = numbers(printed.alone["first epoch"]) + numbers(printed.together["other epochs"])
    assert [epoch for epoch, _, _ in resumed] == [1, 2, 3]
    for (_, loss, accuracy), (_, expected_loss, expected_accuracy) in zip(resumed, alone, strict=True):
        # float32: sums in another order.
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert accuracy == pytest.approx(expected_accuracy, abs=0.003)
    assert [path.name for path in printed.folder.glob("*state*")] == ["state.pt"]
