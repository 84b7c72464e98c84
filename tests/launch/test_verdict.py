"""After which failures a job is started again, and where. The tests check the decision alone, without processes."""

from __future__ import annotations

import pytest

from mpitrain.launch.policy import FailedTry, Limits, Verdict, judge, times_bad

HOSTS = ("a", "b", "c", "d")
FIVE = Limits(restarts=5)


def failure(
    step: int | None, host: str | None = None, *lost: str, when: float = 0.0, first: int | None = 1, cause: str = "x"
) -> FailedTry:
    return FailedTry(cause, 1, when, first, step, host, lost)


def test_a_failure_in_training() -> None:
    assert judge(HOSTS, [failure(7, "b")], [], FIVE, 1.0) == Verdict(HOSTS)


def test_a_failure_before_the_first_step() -> None:
    reason = (
        "it failed before its first step, and would fail again. Only mt.Trainer and mt.keep count steps; any other "
        "script would begin anew"
    )
    assert judge(HOSTS, [failure(None, "b")], [], FIVE, 1.0) == Verdict(reason=reason)
    # In a later try the failure may be chance. A host that vanishes is not a fault of the program.
    assert judge(HOSTS, [failure(7), failure(None, "b")], [], FIVE, 1.0) == Verdict(HOSTS)
    assert judge(HOSTS, [failure(None, None, "b")], [], FIVE, 1.0) == Verdict(("a", "c", "d"))


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_no_more_restarts_than_allowed(restarts: int) -> None:
    failures = [failure(step) for step in range(1, 4)]
    for tried in range(1, 4):
        expected = Verdict(HOSTS) if tried <= restarts else Verdict(reason="no try is left")
        assert judge(HOSTS, failures[:tried], [], Limits(restarts), 1.0) == expected


@pytest.mark.parametrize("between", [[], [failure(8)]])
def test_three_times_at_the_same_step(between: list[FailedTry]) -> None:
    two = [failure(7, "a"), *between, failure(7, "b")]
    assert judge(HOSTS, two, [], FIVE, 1.0).hosts
    assert judge(HOSTS, [*two, failure(9)], [], FIVE, 1.0).hosts
    verdict = judge(HOSTS, [*two, failure(7, "b")], [], FIVE, 1.0)
    assert verdict == Verdict(
        reason="3 tries failed at step 7; on a, b, so no single machine is to blame: examine program and data of "
        "this step; every try began at step 1: no checkpoint was found; the hook mt.Checkpoint writes checkpoints"
    )
    # The same holds if no try is left.
    assert judge(HOSTS, [*two, failure(7, "b")], [], Limits(1), 1.0) == verdict


def test_three_times_on_one_machine_of_several() -> None:
    failures = [failure(7, "b", first=5, cause="rank 1 on b was killed by signal 9")] * 3
    assert judge(HOSTS, failures, [], Limits(5, min_nodes=4), 1.0).reason == (
        "3 tries failed at step 7; always on b: try without this host, or examine what its ranks do in this step; "
        "if nobody sent signal 9, the kernel did, because memory ran out: `sudo dmesg | grep -i oom`"
    )
    assert judge(("localhost",), [failure(7, "localhost", first=5)] * 3, [], FIVE, 1.0).reason == (
        "3 tries failed at step 7; examine program and data of this step"
    )
    assert judge(HOSTS, [failure(7), *[failure(None, first=None)] * 3], [], FIVE, 1.0).reason == (
        "3 tries failed before their first step; examine program and data of this step"
    )


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


def test_a_host_whose_ranks_fail_first_twice_in_a_row() -> None:
    failures = [failure(7, "b"), failure(9, "c"), failure(11, "b")]
    assert judge(HOSTS, failures, [], FIVE, 1.0).hosts == HOSTS
    failures.append(failure(13, "b"))
    assert judge(HOSTS, failures, [], FIVE, 1.0).hosts == ("a", "c", "d")
    # The host answers: a job with it is better than none.
    assert judge(HOSTS, failures, [], Limits(5, min_nodes=4), 1.0).hosts == HOSTS
    assert judge(("b",), failures, [], FIVE, 1.0).hosts == ("b",)
    assert judge(HOSTS, [failure(7), failure(9)], [], FIVE, 1.0).hosts == HOSTS


def test_hosts_that_are_taken_in_when_they_answer() -> None:
    """Such hosts are used at a restart only if the others are too few. No more hosts than the most are ever used."""
    failures = [failure(7, None, "b", when=100.0), failure(9)]
    for least, most, expected in ((2, 4, ("a", "c", "d")), (2, 2, ("a", "c")), (4, 4, HOSTS)):
        limits = Limits(5, least, most)
        assert judge(HOSTS, failures, [], limits, 200.0).hosts == expected
    # b has been taken in meanwhile.
    assert judge(HOSTS, failures, [], Limits(5, 2, 4), 101.0, present={"a", "b"}).hosts == HOSTS
    assert judge(HOSTS, failures, [], Limits(5, 4, 4), 159.0) == Verdict(
        reason="only a, c, d of a, b, c, d can take part, and --elastic is 4:4", left=("a", "c", "d")
    )
    assert times_bad("b", failures, [(300.0, "b"), (300.0, "c")]) == [100.0, 300.0]
    assert times_bad("c", [failure(7, "c"), failure(8, "c"), failure(9, "c")], []) == [0.0, 0.0]


def test_too_few_hosts() -> None:
    failures, absent = [failure(7, None, "b")], [(0.0, "d")]
    assert judge(HOSTS, failures, absent, Limits(5, min_nodes=2), 1.0).hosts == ("a", "c")
    assert judge(HOSTS, failures, absent, Limits(5, min_nodes=3), 1.0) == Verdict(
        reason="only a, c of a, b, c, d can take part, and --min-nodes is 3", left=("a", "c")
    )
    everyone = [(0.0, host) for host in HOSTS]
    assert judge(HOSTS, failures, everyone, FIVE, 1.0).reason == "no host can take part, and --min-nodes is 1"
