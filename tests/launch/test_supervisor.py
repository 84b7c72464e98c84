"""After which failures a job is started again, and where. The tests check the decision alone, without processes."""

from __future__ import annotations

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.change import Change
from mpitrain.launch.ending import Ended
from mpitrain.launch.intake import Intake
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.supervisor import Pause, supervise
from mpitrain.launch.verdict import FailedTry, Limits, Verdict, judge, times_bad
from mpitrain.watching.rank_record import RankRecord

HOSTS = ("a", "b", "c", "d")
FIVE = Limits(restarts=5)


def failure(
    step: int | None, host: str | None = None, *lost: str, when: float = 0.0, first: int | None = 1, cause: str = "x"
) -> FailedTry:
    return FailedTry(cause, 1, when, first, step, host, lost)


def test_a_failure_in_training() -> None:
    assert judge(HOSTS, [failure(7, "b")], [], FIVE, 1.0) == Verdict(HOSTS)


def test_a_failure_before_the_first_step() -> None:
    reason = "it failed before its first step, and would fail again"
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
    # Also if no try is left.
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
    # It is used before the job ends, but not while ranks may be left on it.
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
    """They are used at a restart only if the others are too few. More hosts than the most are never used."""
    failures = [failure(7, None, "b", when=100.0), failure(9)]
    for least, most, expected in ((2, 4, ("a", "c", "d")), (2, 2, ("a", "c")), (4, 4, HOSTS)):
        limits = Limits(5, least, most)
        assert judge(HOSTS, failures, [], limits, 200.0).hosts == expected
    # It has been taken in meanwhile.
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


# -- the loop, with tries that only say how they ended ---------------------------------------------------------

PLACEMENT = Placement(
    (Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, "a"
)


def killed(rank: int, step: int, code: int = 137) -> Ended:
    records = {
        number: RankRecord(number, pid=1000 + number, first_step=1, step=step + (number != rank)) for number in range(5)
    }
    return Ended(
        code, mpiexec_said=f"process rank {rank} with PID 1 on node b exited on\nsignal 9 (K)", records=records
    )


class Tries:
    """Ends tries as told. Keeps the place of each try, and the failure of which it was told."""

    def __init__(self, *ends: Ended | LaunchError) -> None:
        self.ends = list(ends)
        self.ran: list[dict[str, int]] = []
        self.told: list[str] = []

    def __call__(self, placement: Placement, failed: Pause | None) -> Ended:
        self.told.append(failed.cause if failed else "")
        self.ran.append({place.host: place.num_ranks for place in placement.places})
        end = self.ends.pop(0)
        if isinstance(end, LaunchError):
            raise end
        return end


def absent(*hosts: str) -> LaunchError:
    error = LaunchError("no answer")
    error.hosts = hosts
    return error


def test_again_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    tries = Tries(killed(2, 7), Ended(0))
    assert supervise(tries, PLACEMENT, FIVE) == 0
    assert tries.ran == [{"a": 2, "b": 1, "c": 2}] * 2
    assert tries.told == ["", "rank 2 on b was killed by signal 9"]
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: try 1 of 6 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c",
        "mpitrain: try 2 of 6 succeeded",
    ]


def test_without_a_host_that_vanished_or_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lost = Ended(1, lost=("b",), trouble=("b: no message",), records={0: RankRecord(0, pid=1, first_step=5, step=9)})
    tries = Tries(lost, absent("c"), Ended(0))
    assert supervise(tries, PLACEMENT, FIVE) == 0
    assert tries.ran == [{"a": 2, "b": 1, "c": 2}, {"a": 2, "c": 2}, {"a": 2}]
    less = "starting again on a, c with 4 ranks, without b"
    assert capsys.readouterr().err.splitlines() == [
        f"mpitrain: try 1 of 6, from step 4, failed at step 9: b fell silent; {less}",
        "mpitrain: no answer; starting again on a with 2 ranks, without b, c",
        "mpitrain: try 2 of 6 succeeded",
    ]


def test_the_code_is_that_of_the_last_failure(capsys: pytest.CaptureFixture[str]) -> None:
    tries = Tries(killed(2, 7, 137), killed(4, 8, 5))
    assert supervise(tries, PLACEMENT, Limits(1)) == 5
    assert capsys.readouterr().err.endswith("signal 9; not started again: no try is left\n")
    assert supervise(Tries(killed(2, 7), absent("b", "c")), PLACEMENT, Limits(3, min_nodes=2)) == 137
    assert capsys.readouterr().err.endswith(
        "no answer; not started again: only a of a, b, c can take part, and --min-nodes is 2\n"
    )


def test_what_is_never_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    for end, limits in ((Ended(130, is_interrupted=True), FIVE), (Ended(0), FIVE), (killed(2, 7), Limits())):
        tries = Tries(end)
        assert supervise(tries, PLACEMENT, limits) == end.code
        assert len(tries.ran) == 1
    assert capsys.readouterr().err == ""
    for error in (absent("b"), LaunchError("no ssh")):  # of the first try
        with pytest.raises(LaunchError):
            supervise(Tries(error), PLACEMENT, FIVE)
    with pytest.raises(LaunchError, match="the code differs"):
        supervise(Tries(killed(2, 7), LaunchError("the code differs")), PLACEMENT, FIVE)


class Wished:
    """Stands for Changes: has a change after some of the tries."""

    def __init__(self, *changes: Change | None) -> None:
        self.changes = list(changes)
        self.bad: list[tuple[float, str]] = []
        self.begun: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.saves_for: list[str] = []
        self.wanted: list[Change | None] = []

    def begin(self, hosts: Placement, now_on: Placement, saves_for: str) -> None:
        self.begun.append((hosts.hosts, now_on.hosts))
        self.saves_for.append(saves_for)

    def take(self, *, has_left: bool = False) -> Change | None:
        return self.changes.pop(0)

    def take_next(self, change: Change | None) -> None:
        self.wanted.append(change)

    def look(self) -> None:
        """Nothing is prepared."""


class Successor:
    """Stands for the next try, which is ready."""

    def __init__(self, ended: Ended) -> None:
        self.ended = ended

    def to_end(self, meanwhile: object) -> Ended:
        return self.ended


LEAVES = Change("b leaves", PLACEMENT.without({"b"}), PLACEMENT.without({"b"}))
WIDER = Placement((*PLACEMENT.places, Place("d", 5, 2)), own="a")
JOINS = Change("d joins", WIDER, WIDER, ("d",))


def left(step: int) -> Ended:
    return Ended(0, records={0: RankRecord(0, step=step, left_step=step)}, left=(step, 1.0))


def test_a_change_of_hosts_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    tries, wished = Tries(left(7), left(9), killed(0, 12), Ended(0)), Wished(LEAVES, JOINS, None, None)
    assert supervise(tries, PLACEMENT, Limits(1), wished) == 0  # type: ignore[arg-type]
    assert tries.ran == [{"a": 2, "b": 1, "c": 2}, {"a": 2, "c": 2}, *[{"a": 2, "b": 1, "c": 2, "d": 2}] * 2]
    assert tries.told == ["", "b leaves", "d joins", "rank 0 on a was killed by signal 9"]
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: b leaves after step 7; going on on a, c with 4 ranks",
        "mpitrain: d joins after step 9; going on on a, b, c, d with 7 ranks",
        "mpitrain: try 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, b, c, d",
        "mpitrain: try 2 of 2 succeeded",
    ]


def test_a_host_that_cannot_take_part_after_all(capsys: pytest.CaptureFixture[str]) -> None:
    early = Ended(1, failed=RankRecord(5, pid=1, phase="failed", error="OSError: x"), records={5: RankRecord(5)})
    for end, said in (
        (absent("d"), ["mpitrain: the job goes on as before, without d: no answer"]),
        (
            early,
            [
                "mpitrain: with d, the job failed before its first step: rank 5 on d failed: OSError: x",
                "mpitrain: going on as before, on a, b, c with 5 ranks",
            ],
        ),
    ):
        tries, wished = Tries(left(7), end, Ended(0)), Wished(JOINS, None, None)
        assert supervise(tries, PLACEMENT, Limits(1), wished) == 0  # type: ignore[arg-type]
        assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "b", "c", "d"], ["a", "b", "c"]]
        assert capsys.readouterr().err.splitlines()[1:] == said


def test_a_failure_before_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    tries = Tries(killed(0, 7), Ended(0))
    assert supervise(tries, PLACEMENT, FIVE, Wished(LEAVES, None)) == 0  # type: ignore[arg-type]
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "c"]]
    assert supervise(Tries(Ended(0)), PLACEMENT, FIVE, Wished(LEAVES)) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().err.endswith("the job ended before its hosts could change: b leaves\n")


def test_ranks_that_left_for_a_change_that_was_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """Their exit code is 0, and the work is not done."""
    tries, wished = Tries(left(7), killed(0, 12), Ended(0)), Wished(None, None, None)
    assert supervise(tries, PLACEMENT, Limits(1), wished) == 0  # type: ignore[arg-type]
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"]] * 3
    assert "the ranks had left after step 7; starting again on a, b, c with 5 ranks\n" in capsys.readouterr().err


def test_a_failure_before_the_first_step_after_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    """The training has made steps before, so this fault does not come every time."""
    early = Ended(1, failed=RankRecord(0, pid=1, phase="failed", error="OSError: x"), records={0: RankRecord(0)})
    tries, wished = Tries(left(7), early, Ended(0)), Wished(LEAVES, None, None)
    assert supervise(tries, PLACEMENT, Limits(1), wished) == 0  # type: ignore[arg-type]
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "c"], ["a", "c"]]
    assert "failed before its first step: rank 0 on a failed: OSError: x; starting" in capsys.readouterr().err


def test_the_end_of_a_job_of_which_too_few_hosts_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    ends = Change("SIGTERM told rank 0 to end on a", PLACEMENT, PLACEMENT, is_end=True)
    assert supervise(Tries(left(7)), PLACEMENT, FIVE, Wished(ends)) == 128 + 15  # type: ignore[arg-type]
    assert capsys.readouterr().err == "mpitrain: SIGTERM told rank 0 to end on a: the job has ended after step 7\n"
    # The job ended before the wish.
    assert supervise(Tries(Ended(0)), PLACEMENT, FIVE, Wished(ends)) == 0  # type: ignore[arg-type]


def test_the_next_try_takes_over(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not started again. After its failure another one is started, on its hosts."""
    tries, wished = Tries(left(7), Ended(0)), Wished(LEAVES, None, None)
    successors = [Successor(killed(0, 12)), None, None]
    wished.take_next = lambda change: (wished.wanted.append(change), successors.pop(0))[1]  # type: ignore[assignment, return-value]
    assert supervise(tries, PLACEMENT, Limits(1), wished) == 0  # type: ignore[arg-type]
    assert wished.wanted == [LEAVES, None, None]
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "c"]]
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: b leaves after step 7; going on on a, c with 4 ranks",
        "mpitrain: try 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, c",
        "mpitrain: try 2 of 2 succeeded",
    ]


# -- an elastic job --------------------------------------------------------------------------------------------


def elastic(tries: Tries, limits: Limits, wished: Wished) -> int:
    """Supervise tries in which nobody looks for hosts."""
    intake = Intake(wished, limits, lambda: None)  # type: ignore[arg-type]
    return supervise(tries, PLACEMENT, limits, wished, intake)  # type: ignore[arg-type]


def plain(tries: Tries, limits: Limits, wished: Wished) -> int:
    return supervise(tries, PLACEMENT, limits, wished)  # type: ignore[arg-type]


def lost(host: str, step: int) -> Ended:
    return Ended(1, lost=(host,), trouble=("no message",), records={0: RankRecord(0, pid=1, first_step=1, step=step)})


def different(**hosts: str) -> LaunchError:
    error = LaunchError("they differ")
    error.different = hosts
    return error


def test_it_starts_on_the_hosts_that_can_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    for end, said in (
        (absent("b"), "mpitrain: no answer; starting on a, c with 4 ranks, without b\n"),
        (different(b="x.py differs"), "mpitrain: b cannot take part: x.py differs; starting on a, c with 4 ranks, w"),
    ):
        tries, wished = Tries(end, Ended(0)), Wished(None, None)
        assert elastic(tries, Limits(5, 2, 3), wished) == 0
        assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "c"]]
        assert wished.begun[-1] == (("a", "b", "c"), ("a", "c"))
        assert [host for _, host in wished.bad] == ["b"]
        assert capsys.readouterr().err.startswith(said)
    assert elastic(Tries(absent("b", "c")), Limits(5, 2, 3), Wished(None)) == 1
    assert capsys.readouterr().err == (
        "mpitrain: no answer; not started: only a of a, b, c can take part, and --elastic is 2:3\n"
    )
    for error in (different(a="x.py does not exist"), LaunchError("no ssh")):  # of this machine
        with pytest.raises(LaunchError):
            elastic(Tries(error), Limits(5, 1, 3), Wished(None))


def test_it_uses_no_more_hosts_than_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    tries = Tries(lost("b", 7), Ended(0))
    assert elastic(tries, Limits(5, 1, 2), Wished(None, None)) == 0
    assert [list(ran) for ran in tries.ran] == [["a", "b"], ["a", "c"]]
    assert "b fell silent; starting again on a, c with 4 ranks, without b\n" in capsys.readouterr().err


def test_it_saves_where_too_few_hosts_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "only a, b of a, b, c can take part, and --elastic is 3:3"
    ends = Change(reason, PLACEMENT, PLACEMENT.without({"c"}), is_end=True)
    tries, wished = Tries(lost("c", 7), left(9)), Wished(None, ends)
    assert elastic(tries, Limits(5, 3, 3), wished) == 1
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "b"]]
    assert wished.saves_for == ["", reason]
    assert capsys.readouterr().err == (
        f"mpitrain: try 1 of 6 failed at step 7: c fell silent; {reason}. "
        "Starting again on a, b only to save the state\n"
        f"mpitrain: {reason}: the job has ended after step 9\n"
    )
    # Once only, and only if there is a state, and a try.
    for ended, restarts, num_tries in ((lost("c", 7), 5, 2), (lost("c", 0), 5, 1), (lost("c", 7), 0, 1)):
        tries = Tries(ended, lost("b", 8))
        assert elastic(tries, Limits(restarts, 3, 3), Wished(None, None)) == 1
        assert len(tries.ran) == num_tries
    # Another host is found absent meanwhile.
    tries = Tries(lost("c", 7), absent("b"), left(9))
    assert elastic(tries, Limits(5, 3, 3), Wished(None, None, ends)) == 1
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "b"], ["a"]]
    # The training has come to its end in the meantime.
    assert elastic(Tries(lost("c", 7), Ended(0)), Limits(5, 3, 3), Wished(None, None)) == 0


def test_a_host_that_could_not_join_is_taken_in_later() -> None:
    early = Ended(1, failed=RankRecord(5, pid=1, phase="failed", error="OSError: x"), records={5: RankRecord(5)})
    for end in (absent("d"), early):
        tries, wished = Tries(left(7), end, Ended(0)), Wished(JOINS, None, None)
        assert elastic(tries, Limits(1, 1, 4), wished) == 0
        assert wished.begun[-1] == (("a", "b", "c", "d"), ("a", "b", "c"))
        assert [host for _, host in wished.bad] == ["d"]


def test_a_host_that_has_joined_by_a_wish_is_no_longer_set_aside() -> None:
    joins = Change("b joins", PLACEMENT, PLACEMENT, ("b",))
    for limits in (Limits(5), Limits(5, 1, 3)):
        tries, wished = Tries(lost("b", 7), left(9), killed(0, 12), Ended(0)), Wished(None, joins, None, None)
        assert (elastic if limits.max_nodes else plain)(tries, limits, wished) == 0
        assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"], ["a", "b", "c"]]
