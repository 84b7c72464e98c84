"""What guards report of a job: how far its ranks have come, which have vanished, and times by the clock here."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mpitrain.launch.reports import HostClock, HostReport, Phases
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, PARTED, PHASES, STARTED, RankRecord
from mpitrain.watching.view import RankView


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


def test_who_has_vanished() -> None:
    """Ranks that ended 10 s ago and had called init(), unless the programs of all ranks had ended."""
    views = {
        rank: RankView(RankRecord(rank, phase), 100 + rank, ended_seconds=10.1 + rank)
        for rank, phase in enumerate(PHASES)
    }
    assert (views[0].record.phase, views[4].record.phase) == (STARTED, PARTED)
    assert HostReport(dict(reversed(views.items()))).vanished() == [1, 2, 3, 5]  # in the order of ranks, not of arrival
    for ended_seconds in (9.9, None):
        recent = {rank: replace(view, ended_seconds=ended_seconds) for rank, view in views.items()}
        assert HostReport(recent).vanished() == []
    assert HostReport(views).vanished(recovers=True) == [1, 5]  # the others go on without a rank that had begun
    ends = {rank: FirstEnd(rank, (), 0.0, code=code) for rank, code in ((2, 3), (3, 3), (4, -9))}
    assert HostReport(views, ends=ends).vanished(recovers=True) == [1, 2, 5]  # but nobody tells them of an exit code


def test_the_fastest_echo_counts() -> None:
    clock = HostClock()
    assert clock.here(7.0) == 7.0  # without an echo it is the clock here
    # The message took 0.9 s on its way there, or the clocks differ by as much.
    clock.add(sent=10.0, there=110.9, heard=11.0)
    clock.add(sent=12.0, there=112.01, heard=12.02)
    clock.add(sent=14.0, there=114.3, heard=14.4)
    assert clock.here(120.0) == pytest.approx(20.0)


def test_clocks_that_drift_apart_for_a_day() -> None:
    """The fastest echo of all is the first one, when the clocks were 10 s apart; then they drift by 10 us a second."""
    clock, chance = HostClock(), random.Random(15)

    def there(here: float) -> float:
        return here * (1 + 1e-5) + 10.0

    clock.add(sent=0.0, there=there(0.0005), heard=0.001)
    for now in range(1, 24 * 3600):
        way, back = chance.uniform(0.001, 0.02), chance.uniform(0.001, 0.02)
        clock.add(sent=now, there=there(now + way), heard=now + way + back)
    assert clock.here(there(24 * 3600.0)) == pytest.approx(24 * 3600.0, abs=0.01)
