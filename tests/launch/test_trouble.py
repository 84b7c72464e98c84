"""When the start of a job is late or lost, which hosts are lost, and what the launcher says of that."""

from __future__ import annotations

import pytest

from mpitrain.launch.placement import Place
from mpitrain.launch.reports import HostReport, Said
from mpitrain.launch.trouble import account_of, diagnosis, left_over, lost_hosts, misplaced, start_problem
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, STARTED, RankRecord
from mpitrain.watching.view import RankView

PLACES = [Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 1)]
ALL = dict.fromkeys(range(4), 1.0)
THREE = dict.fromkeys(range(3), 1.0)
LATE = "did not call init() within 60 s after rank 0 on a"


def times(**phases: dict[int, float]) -> dict[str, dict[int, float]]:
    return {phase: phases.get(phase, {}) for phase in (STARTED, CALLED, BEGUN, DONE, FAILED)}


@pytest.mark.parametrize(
    ("now", "seen", "expected"),
    [
        (59.0, {"started": {}}, ""),
        (59.0, {"called": {0: 1.0}}, ""),
        (1e9, {"called": ALL, "begun": ALL}, ""),
        (1e9, {"called": ALL, "begun": ALL, "gone": {1: 70.0}}, ""),  # the start was complete before that
        # A program without mpitrain may take its time; and where a rank has ended, the others will too.
        (1e9, {}, ""),
        (200.0, {"gone": {2: 100.0}}, ""),
        (60.0, {"gone": {2: 5.0}}, ""),
        (
            66.0,
            {"gone": {2: 5.0, 3: 5.5}},
            "rank 2 on b, rank 3 on c ended early, and the others have used no processor for 60 s",
        ),
        (66.0, {"gone": {2: 5.0, 3: 5.5}, "idle": 30.0}, ""),
        (1e9, {"started": {}, "called": {0: 1.0}, "limit": 0.0}, ""),
        (
            1e9,
            {"started": {}, "called": {0: 1.0}, "gone": {3: 2.0}, "limit": 0.0},
            "rank 3 on c ended before calling init(), and the others wait there; see its output above",
        ),
        (61.0, {"started": {0: 1.0, 2: 1.0}}, "rank 1 on a, rank 3 on c did not start within 60 s"),
        (64.0, {"called": {0: 5.0, 1: 6.0}}, ""),
        (66.0, {"called": {0: 5.0, 1: 6.0}}, f"rank 2 on b, rank 3 on c: {LATE}"),
        (
            70.0,
            {"called": ALL, "begun": {0: 2.0, 1: 2.0}},
            "init() has not returned on rank 2 on b, rank 3 on c, 60 s after rank 0 on a called it",
        ),
        (5.0, {"called": {0: 1.0, 1: 1.0}, "gone": {2: 1.0, 3: 2.0}}, ""),
        (
            6.5,
            {"called": {0: 1.0, 1: 1.0}, "gone": {2: 1.0, 3: 2.0}},
            "rank 2 on b, rank 3 on c ended before calling init(), and the others wait there; see its output above",
        ),
        (8.0, {"called": ALL, "gone": {3: 2.0}}, "rank 3 on c ended before init() had returned"),
        # It fails between two looks of its agent, which last saw it in init().
        (9.0, {"called": ALL, "begun": THREE, "failed": {3: 2.0}, "gone": {3: 2.5}}, ""),
        # A rank that still reads files imports from a slow share.
        (300.0, {"called": THREE, "read_at": {3: 250.0}}, ""),
        (311.0, {"called": THREE, "read_at": {3: 250.0}}, f"rank 3 on c: {LATE}"),
        (300.0, {"called": THREE, "read_at": {0: 250.0}}, f"rank 3 on c: {LATE}"),
    ],
)
def test_a_start(now: float, seen: dict[str, dict[int, float]], expected: str) -> None:
    seen = dict(seen)
    limit, read_at, gone = seen.pop("limit", 60.0), seen.pop("read_at", {}), seen.pop("gone", {})
    late = {"read_at": read_at, "idle_seconds": seen.pop("idle", 1e9)}
    when = times(**{"started": ALL, **seen})
    said = start_problem(PLACES, when, gone, since=0.0, now=now, start_seconds=limit, **late)  # type: ignore[arg-type]
    assert (said or "").startswith(expected)
    assert bool(said) is bool(expected)


def test_a_rank_on_another_host_than_it_was_meant_for() -> None:
    ranks = {rank: RankView(RankRecord(rank), 100 + rank) for rank in (0, 1, 3)}
    reports = {"a": HostReport({0: ranks[0], 1: ranks[1]}), "b": HostReport(), "c": HostReport({3: ranks[3]})}
    assert misplaced(PLACES, reports) is None
    reports["c"].ranks[2] = RankView(RankRecord(2), 102)
    said = "rank 2 has started on c and was planned for b: mpiexec reads --hosts differently"
    assert misplaced(PLACES, reports) == said


def test_the_diagnosis_names_who_is_behind_and_who_drops() -> None:
    when = times(started=THREE, called={0: 1.0, 1: 2.0}, begun={0: 2.0})
    reports = {
        "a": HostReport(processes=[(7, "S", "python train.py")], unreachable=["c"]),
        "b": HostReport(processes=[(8, "D", "python train.py")], unreachable=["c"]),
        "c": HostReport(processes=None),
    }
    assert "\n".join(diagnosis(PLACES, when, {2: 3.0}, reports)) == (
        "a: rank 0 has begun; rank 1 runs, in init(); 1 processes of the job there\n"
        "b: rank 2 ended before init(); 1 processes of the job there\n"
        "c: rank 3 has not started; its agent does not report what runs there\n"
        "c does not answer a, b on the high ports that MPI uses; does a firewall drop them?\n"
        "look at c first: `ssh c sudo nft list ruleset`; "
        "`ansible-playbook cluster/setup.yml --tags firewall` lets the nodes trust each other"
    )
    reports["b"].unreachable = []
    assert "    8 D python train.py" in diagnosis(PLACES, when, {}, reports)
    when = times(started=ALL, called=ALL, begun=THREE, failed={3: 2.0})
    lines = diagnosis(PLACES, when, {3: 2.5}, {host: HostReport() for host in "abc"})
    assert lines[2] == "c: rank 3 has failed; its agent does not report what runs there"


def test_what_mpiexec_waits_for_when_all_ranks_have_ended() -> None:
    of_mpiexec = [(7, "S", "/usr/bin/mpiexec -n 2 python"), (8, "S", "/opt/bin/hydra_pmi_proxy x"), (9, "S", "prted")]
    head, *rest = left_over({"a": HostReport(processes=[*of_mpiexec, (10, "S", "sleep 15")]), "b": HostReport()})
    assert head.startswith("all ranks have ended, and mpiexec waits for processes that they have started")
    assert rest == ["    a: 10 S sleep 15"]


def test_the_diagnosis_leaves_out_a_host_that_was_lost_before() -> None:
    """The agents were prepared while that host was still there (AttemptOnHosts.narrow)."""
    said = Said(["a", "b", "c", "d"])
    del said.reports["d"]
    for host, unreachable in (("a", ["d"]), ("b", ["d", "c"]), ("c", ["d"])):
        said.take(host, {"processes": [], "unreachable": unreachable}, 1.0, 1.0)
    lines = diagnosis(PLACES, times(started=THREE), {}, said.reports)
    assert [line for line in lines if "does not answer" in line] == [
        "c does not answer b on the high ports that MPI uses; does a firewall drop them?"
    ]


@pytest.mark.parametrize(
    ("silent", "lost"),
    [
        pytest.param({"a": 1, "b": 4.9, "c": 1, "d": 1}, "", id="paused for 4 s"),
        pytest.param({"a": 1, "b": 5.1, "c": 1, "d": 1}, "b", id="cut off"),
        pytest.param({"a": 1, "b": 5.1, "c": 4.9, "d": 1}, "", id="another one may be cut off too"),
        pytest.param({"a": 1, "b": 5.9, "c": 5.1, "d": 1}, "bc", id="two are cut off"),
        pytest.param({"a": 1, "b": 6.3, "c": 0.2, "d": 1}, "b", id="the other one was only late"),
        pytest.param({"a": 1, "b": 15.1, "c": 4.9, "d": 1}, "b", id="the other one is always late"),
        pytest.param({"a": 1, "b": 14, "c": 14, "d": 14}, "", id="this machine may be cut off"),
        pytest.param({"a": 1, "b": 15.1, "c": 15.2, "d": 15.3}, "bcd", id="this machine is cut off"),
        pytest.param({"a": 14, "b": 1, "c": 1, "d": 1}, "", id="an agent here is late"),
        pytest.param({"a": 15.1, "b": 1, "c": 1, "d": 1}, "a", id="an agent here is stopped"),
        pytest.param({"a": 1, "b": 5.1}, "b", id="the only other one is cut off"),
        pytest.param({"a": 14}, "", id="no other one"),
    ],
)
def test_lost_hosts(silent: dict[str, float], lost: str) -> None:
    """The launcher runs on host a."""
    assert lost_hosts(silent, "a") == [*lost]


@pytest.mark.parametrize(
    ("silent", "back", "lost"),
    [
        pytest.param(
            {"a": 1, "b": 8, "c": 0.1, "d": 1}, {"c": 2, "d": 3}, "", id="the others are back: it may be late"
        ),
        pytest.param({"a": 1, "b": 8, "c": 0.1, "d": 1}, {"c": 2}, "b", id="one was never away"),
        pytest.param({"a": 1, "b": 8, "c": 0.1, "d": 1}, {"c": 2, "d": 9}, "b", id="one was back before"),
        pytest.param({"a": 1, "b": 15.1, "c": 0.1, "d": 1}, {"c": 2, "d": 3}, "b", id="it stays away"),
    ],
)
def test_lost_hosts_after_this_machine_was_cut_off(silent: dict[str, float], back: dict[str, float], lost: str) -> None:
    """Its connections come back one after the other, because TCP sends again ever more rarely."""
    assert lost_hosts(silent, "a", back) == [*lost]


def test_the_account_of_lost_hosts() -> None:
    text = account_of(["b", "c"], {"a": 1, "b": 6, "c": 5.1})
    assert text.startswith("b, c: no message from these hosts since ")
    assert "for 6 s: each of them lost power or its network" in text
    assert "`ssh b true`" in text
