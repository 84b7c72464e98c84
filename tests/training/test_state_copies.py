"""The copies of a state in memory: which of them a restart finds."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from keeping import keeper
from mpitrain.launch.kept import KeeperLine
from mpitrain.training.checkpoint.copies import slots_of, state_name
from mpitrain.training.checkpoint.memory_slot import read_copy
from mpitrain.training.state_copies import StateCopies


@pytest.mark.parametrize("copies_before", [0, 1, 2])
def test_a_step_that_is_copied_again(copies_before: int) -> None:
    """An order in a pause changes the state after a step. Only its newest copy stays, whichever slot has it."""
    factor = 1.0
    trained: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1, node_rank=0, node_ranks=(0,)),
        step_number=0,
        own_state=lambda *, reads: {},
        state=lambda: {"w": numpy.zeros(5), "factor": factor},
    )
    with keeper() as name, closing(KeeperLine(name, "try")) as line:
        copies = StateCopies(1, 0)
        copies._line = line
        for trained.step_number in range(1, copies_before + 1):
            copies._copy(trained)
        trained.step_number = 3
        for factor in (0.5, 0.25, 0.125):
            assert copies._copy(trained)[1] == ""
            slots = slots_of(line, state_name(1))
            found = [read_copy(slot.content()).state["factor"] for slot in slots if slot.step == 3]
            for slot in slots:
                slot.close()
            assert found == [factor]
        copies._let_go()
