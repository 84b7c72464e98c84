"""How far ranks have come. The tests need no ranks."""

from __future__ import annotations

from mpitrain.watching.phases import Phases
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, STARTED, RankRecord


def test_who_is_missing() -> None:
    phases = Phases()
    for rank in (10, 9, 2):
        phases.add(RankRecord(rank, BEGUN), 0.0)
    phases.add(RankRecord(9, DONE), 1.0)
    assert phases.missing() == [2, 10]


def test_a_phase_between_two_looks_was_passed_too() -> None:
    phases = Phases()
    phases.add(RankRecord(3, STARTED), 1.0)
    phases.add(RankRecord(3, DONE), 2.0)
    assert phases.when == {STARTED: {3: 1.0}, CALLED: {3: 2.0}, BEGUN: {3: 2.0}, DONE: {3: 2.0}, FAILED: {}}
    phases.add(RankRecord(4, FAILED), 3.0)  # how far it had come is not known
    assert phases.when[FAILED] == {4: 3.0}
    assert phases.missing() == []
