"""What agents report of a job, and what the launcher says about ranks that vanish or stand still."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.launch.placement import Place
from mpitrain.launch.reports import HostClock, HostReport, Phases, Said
from mpitrain.launch.watched import Stalls, WatchedJob
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, PARTED, PHASES, STARTED, WAITS, WORKS, RankRecord
from mpitrain.watching.view import RankView, to_json


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


@pytest.mark.parametrize("neighbour_first", [True, False])
def test_who_failed_first(neighbour_first: bool) -> None:
    """By time; but a rank whose neighbour has gone, and which may say so before that one says why, is not the first."""
    gone = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:10437"
    said = Said(["a", "b"])
    assert said.failed() is None
    first, other = (gone, "ValueError: 1") if neighbour_first else ("ValueError: 1", "ValueError: 2")
    for host, rank, error, seconds in (("a", 0, first, 4.0), ("b", 1, other, 5.0)):
        view = RankView(RankRecord(rank, FAILED, error=error, failed_seconds=seconds), 100 + rank)
        said.take(host, {"ranks": [to_json(view)]}, 6.0, 6.0)
    failed = said.failed()
    assert failed is not None
    assert (failed.rank, failed.error) == (int(neighbour_first), "ValueError: 1")


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
    assert HostReport(views).vanished(recovers=True) == [1, 5]  # the others continue without a rank that had begun
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


WORDS = 'the kernel killed it for want of memory: "Killed process 7"'
UNSAID = "ended without a message (os._exit, or killed?)"


def trouble(reports: dict[str, HostReport], *first_ends: FirstEnd, failed: RankRecord | None = None) -> list[str]:
    """What the launcher says of a job with two ranks on each of these hosts."""
    attempt: Any = SimpleNamespace(
        trouble="", reports=reports, first_ends=lambda: first_ends, failed=lambda: failed, seen=lambda: ({}, [])
    )
    places = [Place(host, 2 * number, 2 * number + 2) for number, host in enumerate(reports)]
    return WatchedJob(places, attempt, Path("/nowhere"), 0.0).trouble()


def gone(*ranks: int) -> dict[int, RankView]:
    return {rank: RankView(RankRecord(rank, BEGUN), 100 + rank, ended_seconds=10.1) for rank in ranks}


@pytest.mark.parametrize(
    ("first", "dead", "expected"),
    [
        (FirstEnd(1, (), 10.0, 7, WORDS), (1,), f"rank 1 on a was killed by signal 9: {WORDS}"),
        (FirstEnd(1, (), 10.0, 7, WORDS), (0, 1), f"rank 1 on a was killed by signal 9: {WORDS}"),
        (FirstEnd(1, (), 10.0, 7), (0, 1), f"rank 1 on a {UNSAID}"),
        (None, (0, 1), f"ranks 0,1 on a {UNSAID}"),
        (FirstEnd(2, (), 10.0, 7, WORDS), (1,), f"rank 1 on a {UNSAID}"),
        (FirstEnd(None, (0,), 10.0, 7, WORDS), (1,), f"rank 1 on a {UNSAID}"),
    ],
)
def test_of_whom_the_kernel_speaks(first: FirstEnd | None, dead: tuple[int, ...], expected: str) -> None:
    """The kernel's words are about the first end on its host, and about no other."""
    said = trouble({"a": HostReport(gone(*dead), first_end=first)}, *([first] if first else []))
    assert said == [f"{expected}, and mpiexec continues: the job is ended"]


@pytest.mark.parametrize(("rank", "why"), [(None, WORDS), (1, "it was killed, or has crashed")])
def test_of_which_process_of_mpiexec_the_kernel_speaks(rank: int | None, why: str) -> None:
    views = {0: RankView(RankRecord(0, BEGUN), 100, is_orphan=True)}
    first = FirstEnd(rank, (0,) if rank is None else (), 10.0, 7, WORDS)
    said = trouble({"a": HostReport(views, first_end=first)}, first)
    assert said == [f"the process of mpiexec on a that started rank 0 has gone: {why}"]


def test_who_vanished_first_on_several_hosts() -> None:
    """mpiexec has ended the others, and then waits for the processes that keep their output open."""
    reports = {"a": HostReport(gone(0, 1)), "b": HostReport(gone(2, 3))}
    first_ends = FirstEnd(3, (), 10.0), FirstEnd(0, (), 10.1)
    goes_on = ", and mpiexec continues: the job is ended"
    assert trouble(reports, *first_ends) == [f"rank 3 on b {UNSAID}{goes_on}"]
    assert trouble(reports) == [f"ranks 0-3 on a and b {UNSAID}{goes_on}"]
    assert trouble(reports, *first_ends, failed=RankRecord(1, BEGUN)) == [f"rank 1 on a failed{goes_on}"]


def stalls(views: list[RankView], when: Any = None, lost: set[int] | None = None) -> Stalls:
    """Of two ranks on host a."""
    attempt: Any = SimpleNamespace(
        reports={"a": HostReport({view.record.rank: view for view in views}, seen=views)},
        lost=lambda: lost or set(),
        look_at_ranks=dict,
        looking=threading.Lock(),
        seen=lambda: (when or {CALLED: {}}, {}),
    )
    return Stalls([Place("a", 0, 2)], attempt)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_rank_waits_no_more(is_lost: bool) -> None:
    """The record of the rank still says that it waits, as when it was killed."""
    record = RankRecord(1, BEGUN, status=WAITS, stall_seconds=1.0, hang_seconds=2.0)
    one = stalls([RankView(record, 4711, seconds=100.0, state="S")], lost={1} if is_lost else set())
    assert (one.news() == []) is is_lost
    assert (one.fatal() == []) is is_lost


@pytest.mark.parametrize(
    ("phase", "status", "is_ended"),
    [
        (CALLED, WAITS, True),
        (CALLED, WORKS, True),  # it stands before its wait, or behind it
        (BEGUN, WORKS, True),  # it has left init(), so the wait of the other one cannot be for a late start
        (STARTED, WORKS, False),  # of a job over hosts; what it does before init() may take any time
        (None, WORKS, False),  # the same on one host
    ],
)
def test_a_wait_in_init_counts_from_the_last_call(phase: str | None, status: int, is_ended: bool) -> None:
    def fatal(last: float) -> list[str]:
        """The first rank has waited for long, the last one has called init() this long ago."""
        phases, views, now = Phases(), [], time.monotonic()
        for rank, rank_phase, does, seconds in ((0, CALLED, WAITS, 1000.0), (1, phase, status, last)):
            if rank_phase is not None:
                record = RankRecord(
                    rank, rank_phase, status=does, words="init()", stall_seconds=30.0, hang_seconds=60.0
                )
                views.append(RankView(record, 4711 + rank, seconds=seconds if does == WAITS else 0.0, state="S"))
                phases.add(record, now - seconds)
        return stalls(views, phases.when).fatal()

    assert fatal(50.0) == []
    assert bool(fatal(60.0)) is is_ended


def test_a_network_is_suspected_only_where_a_host_does_not_answer() -> None:
    """Ranks that are merely slow wait in the same way."""
    record = RankRecord(0, BEGUN, status=WAITS, words="mean", stall_seconds=1.0, hang_seconds=0.0)
    views = {
        host: RankView(replace(record, rank=rank), 4711, seconds=2.0, state="S", host=host)
        for rank, host in enumerate("ab")
    }
    reports = {host: HostReport({view.record.rank: view}, seen=[view]) for host, view in views.items()}
    asked: dict[str, list[str]] = {}

    def look() -> None:
        for host, report in reports.items():
            report.processes = [] if host in asked else None
            report.unreachable = asked.get(host, [])

    attempt: Any = SimpleNamespace(reports=reports, lost=set, look_at_ranks=dict, looking=threading.Lock(), look=look)

    def said() -> str:
        (line,) = Stalls([Place("a", 0, 1), Place("b", 1, 1)], attempt).news()
        return line

    assert "all ranks are there: is the load too high" in said()
    asked |= {"a": [], "b": []}
    assert "all ranks are there, and their hosts answer each other: is the load too high" in said()
    asked["a"] = ["b"]
    assert "b does not answer a on the high ports that MPI uses: is a cable, a switch or a firewall at fault?" in said()
