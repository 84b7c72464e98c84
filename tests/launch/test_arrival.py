"""When the start of a job is complete, late or lost."""

from __future__ import annotations

from mpitrain.launch.placement import Place
from mpitrain.launch.reports import HostReport, Said
from mpitrain.launch.trouble import diagnosis, misplaced, start_problem
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, STARTED, RankRecord
from mpitrain.watching.view import RankView

PLACES = [Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 1)]
EVERYONE = dict.fromkeys(range(4), 1.0)


def judged(
    now: float,
    *,
    started: dict[int, float] | None = None,
    called: dict[int, float] | None = None,
    begun: dict[int, float] | None = None,
    failed: dict[int, float] | None = None,
    gone: dict[int, float] | None = None,
    start_seconds: float = 60.0,
    read_at: dict[int, float] | None = None,
) -> str | None:
    when = {STARTED: EVERYONE if started is None else started, CALLED: called or {}, BEGUN: begun or {}, DONE: {}}
    when[FAILED] = failed or {}
    return start_problem(
        PLACES, when, gone or {}, since=0.0, now=now, start_seconds=start_seconds, read_at=read_at or {}
    )


def test_a_start_that_is_well() -> None:
    assert judged(59.0, started={}) is None
    assert judged(59.0, called={0: 1.0}) is None
    assert judged(1e9, called=EVERYONE, begun=EVERYONE) is None
    assert judged(1e9, called=EVERYONE, begun=EVERYONE, gone={1: 70.0}) is None  # the start was complete before that


def test_a_program_without_mpitrain_may_take_its_time() -> None:
    assert judged(1e9) is None
    assert judged(200.0, gone={2: 100.0}) is None  # the rank has ended, and the others will too
    assert judged(60.0, gone={2: 5.0}) is None


def test_no_limit() -> None:
    assert judged(1e9, started={}, called={0: 1.0}, start_seconds=0.0) is None
    ended = judged(1e9, started={}, called={0: 1.0}, gone={3: 2.0}, start_seconds=0.0)
    assert ended == "rank 3 on c ended before calling init(), and the others wait there; see its output above"


def test_a_rank_that_never_starts() -> None:
    text = judged(61.0, started={0: 1.0, 2: 1.0})
    assert text is not None
    assert text.startswith("rank 1 on a, rank 3 on c did not start within 60 s")


def test_a_rank_that_does_not_call_init() -> None:
    assert judged(64.0, called={0: 5.0, 1: 6.0}) is None
    text = judged(66.0, called={0: 5.0, 1: 6.0})
    assert text is not None
    assert text.startswith("rank 2 on b, rank 3 on c: did not call init() within 60 s after rank 0 on a")


def test_an_init_that_does_not_return() -> None:
    text = judged(70.0, called=EVERYONE, begun={0: 2.0, 1: 2.0})
    assert text == "init() has not returned on rank 2 on b, rank 3 on c, 60 s after rank 0 on a called it"


def test_a_rank_that_ends_before_init() -> None:
    called = {0: 1.0, 1: 1.0}
    assert judged(5.0, called=called, gone={2: 1.0, 3: 2.0}) is None
    assert judged(6.5, called=called, gone={2: 1.0, 3: 2.0}) == (
        "rank 2 on b, rank 3 on c ended before calling init(), and the others wait there; see its output above"
    )
    text = judged(8.0, called=EVERYONE, gone={3: 2.0})
    assert text is not None
    assert text.startswith("rank 3 on c ended before init() had returned")


def test_a_rank_that_fails_right_after_init() -> None:
    """The rank fails between two looks of the guard. The guard last saw the rank in init()."""
    others = {0: 1.5, 1: 1.5, 2: 1.5}
    assert judged(9.0, called=EVERYONE, begun=others, failed={3: 2.0}, gone={3: 2.5}) is None
    when = {STARTED: EVERYONE, CALLED: EVERYONE, BEGUN: others, DONE: {}, FAILED: {3: 2.0}}
    lines = diagnosis(PLACES, when, {3: 2.5}, {host: HostReport() for host in "abc"})
    assert lines[2] == "c: rank 3 has failed; its guard does not report what runs there"


def test_a_rank_without_mpitrain_that_ends_early() -> None:
    text = judged(66.0, gone={2: 5.0, 3: 5.5})
    assert text is not None
    assert text.startswith("rank 2 on b, rank 3 on c ended early, and the others have gone on for 60 s")


def test_a_rank_on_another_host_than_it_was_meant_for() -> None:
    ranks = {rank: RankView(RankRecord(rank), 100 + rank) for rank in (0, 1, 3)}
    reports = {"a": HostReport({0: ranks[0], 1: ranks[1]}), "b": HostReport(), "c": HostReport({3: ranks[3]})}
    assert misplaced(PLACES, reports) is None
    reports["c"].ranks[2] = RankView(RankRecord(2), 102)
    assert misplaced(PLACES, reports) == (
        "rank 2 has started on c and was meant for b: mpiexec reads --hosts otherwise"
    )


def test_the_diagnosis_names_who_is_behind_and_who_drops() -> None:
    when = {STARTED: {0: 1.0, 1: 1.0, 2: 1.0}, CALLED: {0: 1.0, 1: 2.0}, BEGUN: {0: 2.0}, DONE: {}, FAILED: {}}
    reports = {
        "a": HostReport(processes=[(7, "S", "python train.py")], unreachable=["c"]),
        "b": HostReport(processes=[(8, "D", "python train.py")], unreachable=["c"]),
        "c": HostReport(processes=None),
    }
    assert diagnosis(PLACES, when, {2: 3.0}, reports) == [
        "a: rank 0 has begun; rank 1 runs, in init(); 1 processes of the job there",
        "b: rank 2 ended before init(); 1 processes of the job there",
        "c: rank 3 has not started; its guard does not report what runs there",
        "c does not answer a, b on the high ports that MPI uses; does a firewall drop them?",
        (
            "look at c first: `ssh c sudo nft list ruleset`; "
            "`ansible-playbook cluster/setup.yml --tags firewall` lets the nodes trust each other"
        ),
    ]
    reports["b"].unreachable = []
    assert "    8 D python train.py" in diagnosis(PLACES, when, {}, reports)


def test_the_diagnosis_leaves_out_a_host_that_was_lost_before() -> None:
    """The guards were prepared while that host was still there (Guards.narrow)."""
    said = Said(["a", "b", "c", "d"])
    del said.reports["d"]
    for host, unreachable in (("a", ["d"]), ("b", ["d", "c"]), ("c", ["d"])):
        said.take(host, {"processes": [], "unreachable": unreachable}, 1.0, 1.0)
    when = {STARTED: {0: 1.0, 1: 1.0, 2: 1.0}, CALLED: {}, BEGUN: {}, DONE: {}, FAILED: {}}
    lines = diagnosis(PLACES, when, {}, said.reports)
    assert [line for line in lines if "does not answer" in line] == [
        "c does not answer b on the high ports that MPI uses; does a firewall drop them?"
    ]


def test_a_rank_that_still_reads_files_is_not_late() -> None:
    """It imports from a slow share."""
    called = {rank: 1.0 for rank in EVERYONE if rank != 3}
    assert judged(300.0, called=called, read_at={3: 250.0}) is None
    assert "did not call init()" in (judged(311.0, called=called, read_at={3: 250.0}) or "")
    assert "did not call init()" in (judged(300.0, called=called, read_at={0: 250.0}) or "")
