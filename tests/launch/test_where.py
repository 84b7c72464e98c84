"""After which failures a job is started again, and where: the decision alone, without processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mpitrain.launch import where as its
from mpitrain.launch.events import FailedAttempt, JobState, Limits
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.where import Verdict, times_bad

HOSTS = ("a", "b", "c", "d")
FIVE = Limits(restarts=5)
SAME_STEP = "3 attempts failed at step 7; "
SEVERAL = (
    f"{SAME_STEP}on a, b, so no single machine is to blame: examine program and data of this step; "
    "every attempt began at step 1: no checkpoint was found; the hook mt.Checkpoint writes checkpoints"
)
ALWAYS_ON_B = (
    f"{SAME_STEP}always on b: try without this host, or examine what its ranks do in this step; "
    "if nobody sent signal 9, the kernel did, because memory ran out: `sudo dmesg | grep -i oom`"
)
FIRST_STEP = (
    "it failed before its first step, and would fail again. Only mt.Trainer and mt.keep count steps; any other script "
    "would begin anew"
)


def failure(
    step: int | None, host: str | None = None, *lost: str, when: float = 0.0, first: int | None = 1, cause: str = "x"
) -> FailedAttempt:
    return FailedAttempt(cause, 1, when, first, step, host, lost)


def judge(
    hosts: Sequence[str],
    failures: Sequence[FailedAttempt],
    absent: Sequence[tuple[float, str]],
    limits: Limits,
    now: float,
    present: frozenset[str] = frozenset(),
    holders: frozenset[str] = frozenset(),
    silent: frozenset[str] = frozenset(),
) -> Verdict:
    where = Placement(tuple(Place(host, number, 1) for number, host in enumerate(hosts)))
    state = JobState(limits, where, where, failures=tuple(failures), absent=tuple(absent), holders=holders)
    return its.judge(state, now, present, silent)


KILLED = failure(7, "b", first=5, cause="rank 1 on b was killed by signal 9")
TWO = [failure(7, "a"), failure(7, "b")]
SUSPECT = [failure(7, "b"), failure(9, "c"), failure(11, "b")]


@pytest.mark.parametrize(
    ("failures", "limits", "expected"),
    [
        ([failure(7, "b")], FIVE, "abcd"),
        ([failure(None, "b")], FIVE, FIRST_STEP),
        # In a later try the failure may be chance. A host that vanishes is not a fault of the program.
        ([failure(7), failure(None, "b")], FIVE, "abcd"),
        ([failure(None, None, "b")], FIVE, "acd"),
        *(
            (
                [failure(step) for step in range(1, tried + 1)],
                Limits(restarts),
                "abcd" if tried <= restarts else "no attempt is left",
            )
            for restarts in range(3)
            for tried in (1, 2, 3)
        ),
        (TWO, FIVE, "abcd"),
        ([*TWO, failure(9)], FIVE, "abcd"),
        # The same holds if no attempt is left, or other steps came between.
        ([*TWO, failure(7, "b")], FIVE, SEVERAL),
        ([*TWO, failure(7, "b")], Limits(1), SEVERAL),
        ([TWO[0], failure(8), *TWO[1:], failure(7, "b")], FIVE, SEVERAL),
        ([KILLED] * 3, Limits(5, min_nodes=4), ALWAYS_ON_B),
        (
            [failure(7), *[failure(None, first=None)] * 3],
            FIVE,
            "3 attempts failed before their first step; examine program and data of this step",
        ),
        # A host whose ranks fail first twice in a row is left out, unless a job without it is none.
        (SUSPECT, FIVE, "abcd"),
        ([*SUSPECT, failure(13, "b")], FIVE, "acd"),
        ([*SUSPECT, failure(13, "b")], Limits(5, min_nodes=4), "abcd"),
        ([failure(7), failure(9)], FIVE, "abcd"),
    ],
)
def test_whether_and_where_it_starts_again(failures: list[FailedAttempt], limits: Limits, expected: str) -> None:
    is_reason = " " in expected
    verdict = Verdict(reason=expected) if is_reason else Verdict(tuple(expected))
    assert judge(HOSTS, failures, [], limits, 1.0) == verdict


def test_a_job_on_one_host() -> None:
    failures = [failure(7, "b", first=5)] * 3
    assert judge(("b",), failures, [], FIVE, 1.0).reason == f"{SAME_STEP}examine program and data of this step"
    assert judge(("b",), [*SUSPECT, failure(13, "b")], [], FIVE, 1.0).hosts == ("b",)


def test_a_host_that_fell_silent_comes_back_later_and_later() -> None:
    failures = [failure(7, None, "b", when=100.0)]
    assert judge(HOSTS, failures, [], FIVE, 159.0).hosts == ("a", "c", "d")
    assert judge(HOSTS, failures, [], FIVE, 160.0).hosts == HOSTS
    failures.append(failure(9, None, "b", when=200.0))
    assert judge(HOSTS, failures, [], FIVE, 319.0).hosts == ("a", "c", "d")
    assert judge(HOSTS, failures, [], FIVE, 320.0).hosts == HOSTS
    # The host is used before the job ends, but not while ranks may be left on it.
    for elastic in (None, 4):
        limits = Limits(5, min_nodes=4, max_nodes=elastic)
        assert judge(HOSTS, failures, [], limits, 259.0).left == ("a", "c", "d")
        assert judge(HOSTS, failures, [], limits, 260.0).hosts == HOSTS
    absent = [(1000.0 * number, "b") for number in range(1, 9)]
    assert judge(HOSTS, failures, absent, FIVE, 8000.0 + 3599.0).hosts == ("a", "c", "d")
    assert judge(HOSTS, failures, absent, FIVE, 8000.0 + 3600.0).hosts == HOSTS


def test_hosts_that_are_taken_in_when_they_answer() -> None:
    """Such hosts are used at a restart only if the others are too few. No more hosts than the most are ever used."""
    failures = [failure(7, None, "b", when=100.0), failure(9)]
    for least, most, expected in ((2, 4, ("a", "c", "d")), (2, 2, ("a", "c")), (4, 4, HOSTS)):
        assert judge(HOSTS, failures, [], Limits(5, least, most), 200.0).hosts == expected
    # b has been taken in meanwhile.
    assert judge(HOSTS, failures, [], Limits(5, 2, 4), 101.0, present=frozenset("ab")).hosts == HOSTS
    assert judge(HOSTS, failures, [], Limits(5, 4, 4), 159.0) == Verdict(
        reason="only a, c, d of a, b, c, d can take part, and --nnodes is 4", left=("a", "c", "d"), lost=("b",)
    )
    assert times_bad("b", failures, [(300.0, "b"), (300.0, "c")]) == [100.0, 300.0]
    assert times_bad("c", [failure(7, "c"), failure(8, "c"), failure(9, "c")], []) == [0.0, 0.0]


def test_too_few_hosts() -> None:
    failures, absent = [failure(7, None, "b")], [(0.0, "d")]
    assert judge(HOSTS, failures, absent, Limits(5, min_nodes=2), 1.0).hosts == ("a", "c")
    assert judge(HOSTS, failures, absent, Limits(5, min_nodes=3), 1.0) == Verdict(
        reason="only a, c of a, b, c, d can take part, and the job needs 3", left=("a", "c"), lost=("b", "d")
    )
    # b does not answer, whenever it was lost. With it and d they would not be enough.
    assert judge(HOSTS, failures, absent, Limits(5, min_nodes=3), 99.0, silent=frozenset("bd")).lost == ("b", "d")
    assert judge(HOSTS, failures, absent, Limits(5, min_nodes=5), 1.0).lost == ()
    everyone = [(0.0, host) for host in HOSTS]
    assert judge(HOSTS, failures, everyone, FIVE, 1.0).reason == "no host can take part, and the job needs one"


def test_one_host_that_has_the_state_takes_part() -> None:
    """What a host holds is dropped when it does not."""
    failures = [failure(7, "b"), failure(9, "b", when=1.0)]
    assert judge(("a", "b"), failures, [], FIVE, 2.0).hosts == ("a",)
    assert judge(("a", "b"), failures, [], FIVE, 2.0, holders=frozenset("b")).hosts == ("b", "a")
    assert judge(("a", "b"), failures, [], Limits(5, 1, 1), 2.0, holders=frozenset("b")).hosts == ("b",)
    assert judge(
        ("a", "b"), [*failures, failure(11, None, "b", when=3.0)], [], FIVE, 4.0, holders=frozenset("b")
    ).hosts == ("a",)
