"""How far ranks have come. The tests need no ranks."""

from __future__ import annotations

from mpitrain.launch.reports import Phases
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, PARTED, STARTED, RankRecord


def test_who_is_missing() -> None:
    phases = Phases()
    for rank in (10, 9, 2):
        phases.add(RankRecord(rank, BEGUN), 0.0)
    phases.add(RankRecord(9, DONE), 1.0)
    assert phases.missing(set()) == [2, 10]
    assert phases.missing({2}) == [10]
    assert phases.missing({2, 10}) == [9]  # the others have gone on without these, and rank 9 has not parted from them
    phases.add(RankRecord(2, DONE), 2.0)
    phases.add(RankRecord(10, PARTED), 2.0)
    assert phases.missing(set()) == [2, 9]
    phases.add(RankRecord(2, PARTED), 3.0)
    phases.add(RankRecord(9, PARTED), 3.0)
    assert phases.missing(set()) == []


def test_a_phase_between_two_looks_was_passed_too() -> None:
    phases = Phases()
    phases.add(RankRecord(3, STARTED), 1.0)
    phases.add(RankRecord(3, DONE), 2.0)
    assert phases.when == {STARTED: {3: 1.0}, CALLED: {3: 2.0}, BEGUN: {3: 2.0}, DONE: {3: 2.0}, PARTED: {}, FAILED: {}}
    phases.add(RankRecord(4, FAILED), 3.0)  # how far it had come is not known
    assert phases.when[FAILED] == {4: 3.0}
    assert phases.missing(set()) == [3]
