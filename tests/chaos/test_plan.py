"""The faults of a plan: their kinds, times and victims."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from mpitrain.errors import ConfigError
from testbed.chaos.plan import KINDS, Fault, parse_kinds, plan


def test_the_seed_alone_makes_the_plan() -> None:
    first, again, other = ([*islice(plan(KINDS, 30.0, seed), 60)] for seed in (1, 1, 2))
    assert first == again
    assert [fault.kind for fault in first] != [fault.kind for fault in other]
    assert [fault.seconds for fault in first] != [fault.seconds for fault in other]


def test_every_kind_once_in_a_round_and_no_two_faults_close_together() -> None:
    faults = [*islice(plan(("rank", "freeze", "link"), 10.0, 3), 300)]
    assert [fault.number for fault in faults] == [*range(1, 301)]
    for begin in range(0, 300, 3):
        assert {fault.kind for fault in faults[begin : begin + 3]} == {"rank", "freeze", "link"}
    assert all(5.0 <= after.seconds - before.seconds <= 15.0 for before, after in pairwise(faults))
    assert abs(faults[-1].seconds - 3000.0) <= 2.5
    assert {fault.is_of_host for fault in faults if fault.kind == "freeze"} == {True, False}


RANKS = {0: "a", 1: "a", 2: "b", 5: "c"}


@pytest.mark.parametrize(
    ("kind", "is_of_host", "picks"),
    [
        ("rank", True, {(0, "a"), (1, "a"), (2, "b"), (5, "c")}),
        ("freeze", False, {(0, "a"), (1, "a"), (2, "b"), (5, "c")}),
        ("freeze", True, {(None, "a"), (None, "b"), (None, "c")}),
        ("link", False, {(None, "b"), (None, "c")}),
        ("host", False, {(None, "b"), (None, "c")}),
        ("disk", False, {(None, "b")}),
    ],
)
def test_each_victim_comes_and_no_other(kind: str, is_of_host: bool, picks: set[tuple[int | None, str]]) -> None:
    faults = [Fault(1, 1.0, kind, pick / 100, is_of_host) for pick in range(100)]
    assert {fault.victim(RANKS, apart="a", folders=["b"]) for fault in faults} == picks


def test_nobody_to_hit_and_unknown_kinds() -> None:
    with pytest.raises(LookupError, match="no rank is between its start and its end"):
        Fault(1, 1.0, "rank", 0.5, False).victim({}, "a", [])
    with pytest.raises(LookupError, match="all ranks are on a, where the launcher is"):
        Fault(1, 1.0, "link", 0.5, False).victim({0: "a"}, "a", [])
    assert parse_kinds("rank,disk") == ("rank", "disk")
    with pytest.raises(ConfigError, match=r"no fault 'cable'; known: rank, freeze, link, host, disk"):
        parse_kinds("rank,cable")
    with pytest.raises(ConfigError, match="name each kind once"):
        parse_kinds("rank,rank")
