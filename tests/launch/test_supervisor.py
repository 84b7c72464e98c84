"""The supervisor starts a job again after a failure or a change of hosts. The tries only say how they ended."""

from __future__ import annotations

import pytest
from supervising import JOINS, LEAVES, PLACEMENT, Successor, Tries, Wished, absent, killed, left

from mpitrain.errors import LaunchError
from mpitrain.launch.ending import Ended
from mpitrain.launch.policy import Change, Limits
from mpitrain.launch.supervisor import supervise
from mpitrain.watching.rank_record import RankRecord

FIVE = Limits(restarts=5)


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
    tries = Tries(killed(2, 7), absent("b", "c"), left(6))
    assert supervise(tries, PLACEMENT, Limits(3, min_nodes=2)) == 137
    assert capsys.readouterr().err.endswith(
        "no answer; only a of a, b, c can take part, and --min-nodes is 2. Starting again on a only to save the state\n"
        "mpitrain: only a of a, b, c can take part, and --min-nodes is 2: the job has ended after step 6, which is "
        "saved\n"
    )
    assert supervise(Tries(killed(2, 7), absent("a", "b", "c")), PLACEMENT, Limits(3, min_nodes=2)) == 137
    assert capsys.readouterr().err.endswith(
        "no answer; not started again: no host can take part, and --min-nodes is 2\n"
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
    """The exit code of the ranks is 0, but the work is not done."""
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
    """The next try is not started again. After it fails, another try starts on its hosts."""
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
