"""What the launcher says about ranks that vanish or stand still, from the reports of its guards."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.launch.placement import Place
from mpitrain.launch.reports import HostReport, Phases
from mpitrain.launch.watched import Stalls, WatchedJob
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, CALLED, PARTED, PHASES, STARTED, WAITS, WORKS, RankRecord
from mpitrain.watching.view import RankView


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


WORDS = 'the kernel killed it for want of memory: "Killed process 7"'


@pytest.mark.parametrize(
    ("first", "dead", "expected"),
    [
        (FirstEnd(1, (), 10.0, 7, WORDS), (1,), f"rank 1 on a was killed by signal 9: {WORDS}"),
        (FirstEnd(1, (), 10.0, 7, WORDS), (0, 1), f"rank 1 on a was killed by signal 9: {WORDS}"),
        (FirstEnd(1, (), 10.0, 7), (0, 1), "rank 1 on a ended without a word (os._exit, or killed?)"),
        (None, (0, 1), "ranks 0,1 on a ended without a word (os._exit, or killed?)"),
        (FirstEnd(2, (), 10.0, 7, WORDS), (1,), "rank 1 on a ended without a word (os._exit, or killed?)"),
        (FirstEnd(None, (0,), 10.0, 7, WORDS), (1,), "rank 1 on a ended without a word (os._exit, or killed?)"),
    ],
)
def test_of_whom_the_kernel_speaks(first: FirstEnd | None, dead: tuple[int, ...], expected: str) -> None:
    """The kernel's words are about the first end on its host, and about no other."""
    views = {rank: RankView(RankRecord(rank, BEGUN), 100 + rank, ended_seconds=10.1) for rank in dead}
    report = HostReport(views, first_end=first)
    assert trouble_of(report) == [f"{expected}, and mpiexec goes on: the job is ended"]


@pytest.mark.parametrize(("rank", "why"), [(None, WORDS), (1, "it was killed, or has crashed")])
def test_of_which_process_of_mpiexec_the_kernel_speaks(rank: int | None, why: str) -> None:
    views = {0: RankView(RankRecord(0, BEGUN), 100, is_orphan=True)}
    report = HostReport(views, first_end=FirstEnd(rank, (0,) if rank is None else (), 10.0, 7, WORDS))
    assert trouble_of(report) == [f"the process of mpiexec on a that started rank 0 has gone: {why}"]


def trouble_of(report: HostReport) -> list[str]:
    """What the launcher says of a job on one host, `a`, from the report of its guard."""
    return trouble({"a": report}, [report.first_end] if report.first_end else [])


def trouble(reports: dict[str, HostReport], first_ends: list[FirstEnd], failed: RankRecord | None = None) -> list[str]:
    guards: Any = SimpleNamespace(
        trouble="",
        reports=reports,
        first_ends=lambda: first_ends,
        failed=lambda: failed,
        seen=lambda: ({}, []),
    )
    places = [Place(host, 2 * number, 2 * number + 2) for number, host in enumerate(reports)]
    return WatchedJob(places, guards, Path("/nowhere"), 0.0).trouble()


def test_who_vanished_first_on_several_hosts() -> None:
    """mpiexec has ended the others, and then waits for the processes that keep their output open."""
    views = {rank: RankView(RankRecord(rank, BEGUN), 100 + rank, ended_seconds=10.1) for rank in range(4)}
    reports = {
        host: HostReport({rank: views[rank] for rank in ranks}) for host, ranks in (("a", (0, 1)), ("b", (2, 3)))
    }
    first_ends = [FirstEnd(3, (), 10.0), FirstEnd(0, (), 10.1)]
    goes_on = ", and mpiexec goes on: the job is ended"
    assert trouble(reports, first_ends) == [f"rank 3 on b ended without a word (os._exit, or killed?){goes_on}"]
    assert trouble(reports, []) == [f"ranks 0-3 on a and b ended without a word (os._exit, or killed?){goes_on}"]
    assert trouble(reports, first_ends, views[1].record) == [f"rank 1 on a failed{goes_on}"]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_rank_waits_no_more(is_lost: bool) -> None:
    """The record of the rank still says that it waits, as when it was killed."""
    record = RankRecord(1, BEGUN, status=WAITS, stall_seconds=1.0, hang_seconds=2.0)
    view = RankView(record, 4711, seconds=100.0, state="S")
    report = HostReport({1: view}, seen=[view])
    guards: Any = SimpleNamespace(
        reports={"a": report},
        lost=lambda: {1} if is_lost else set(),
        look_at_ranks=dict,
        looking=threading.Lock(),
        seen=lambda: ({CALLED: {}}, {}),
    )
    stalls = Stalls([Place("a", 0, 2)], guards)
    assert (stalls.news() == []) is is_lost
    assert (stalls.fatal() == []) is is_lost


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
    def view(rank: int, phase: str, status: int, seconds: float) -> RankView:
        record = RankRecord(rank, phase, status=status, words="init()", stall_seconds=30.0, hang_seconds=60.0)
        return RankView(record, 4711 + rank, seconds=seconds if status == WAITS else 0.0, state="S")

    def fatal(last: float) -> list[str]:
        """The first rank has waited for long, the last one has called init() this long ago."""
        views = {0: view(0, CALLED, WAITS, 1000.0)}
        phases, now = Phases(), time.monotonic()
        phases.add(views[0].record, now - 1000.0)
        if phase is not None:
            views[1] = view(1, phase, status, last)
            phases.add(views[1].record, now - last)
        report = HostReport(views, seen=list(views.values()))
        guards: Any = SimpleNamespace(
            reports={"a": report},
            lost=set,
            look_at_ranks=dict,
            looking=threading.Lock(),
            seen=lambda: (phases.when, {}),
        )
        return Stalls([Place("a", 0, 2)], guards).fatal()

    assert fatal(50.0) == []
    assert bool(fatal(60.0)) is is_ended


def test_a_network_is_suspected_only_where_a_host_does_not_answer() -> None:
    """Ranks that are merely slow wait in the same way."""
    record = RankRecord(0, BEGUN, status=WAITS, words="mean", stall_seconds=1.0, hang_seconds=0.0)
    views = {
        host: RankView(replace(record, rank=rank), 4711, seconds=2.0, state="S", host=host)
        for rank, host in [(0, "a"), (1, "b")]
    }
    reports = {host: HostReport({view.record.rank: view}, seen=[view]) for host, view in views.items()}
    asked: dict[str, list[str]] = {}

    def look() -> None:
        for host, report in reports.items():
            report.processes = [] if host in asked else None
            report.unreachable = asked.get(host, [])

    guards: Any = SimpleNamespace(reports=reports, lost=set, look_at_ranks=dict, looking=threading.Lock(), look=look)

    def said() -> str:
        (line,) = Stalls([Place("a", 0, 1), Place("b", 1, 1)], guards).news()
        return line

    assert "all ranks are there: is the load too high" in said()
    asked |= {"a": [], "b": []}
    assert "all ranks are there, and their hosts answer each other: is the load too high" in said()
    asked["a"] = ["b"]
    assert "b does not answer a on the high ports that MPI uses: is a cable, a switch or a firewall at fault?" in said()
