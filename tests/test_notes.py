"""Which notes are still to be read, where ranks are gone. tests/faults/test_recovery.py has jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpitrain.waiting.notes import FINISHED, Notes, as_numbers, as_text


def test_nobody_waits_for_ranks_that_are_gone() -> None:
    """Whether MPI says so in Test, or only elsewhere; other errors are not passed over."""
    failed: dict[int, int] = {}
    received: set[int] = set()

    def test(place: int) -> bool:
        if place in failed:
            raise MPI.Exception(failed[place])
        return place in received

    def issend(_: Any, place: int, tag: int) -> Any:
        return SimpleNamespace(Test=lambda: test(place))

    comm: Any = SimpleNamespace(rank=0, Issend=issend)
    notes = Notes(comm, [2, 3, 5, 7, 9])
    notes.tell_all(FINISHED)
    failed[1] = MPI.ERR_TRUNCATE
    with pytest.raises(MPI.Exception):
        notes.is_unread()
    failed[1] = MPI.ERR_PROC_FAILED
    assert notes.is_unread()
    assert notes.is_unread({5})
    received.add(3)
    assert notes.is_unread({5})
    assert not notes.is_unread({9})


@pytest.mark.parametrize(
    "text", ["", "a", "process group 0\ncall 7 is all_reduce (SUM, 3 float32)" * 40, "\0\uffff" * 9]
)
def test_a_text_goes_as_numbers(text: str) -> None:
    numbers = as_numbers(text)
    assert as_text(numbers) == text
    assert all(number == int(number) < 2**53 for number in numbers)
