"""The supervisor of an elastic job: the hosts on which it starts, goes on or only saves its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from supervising import JOINS, PLACEMENT, Tries, Wished, absent, killed, left

from mpitrain.errors import LaunchError
from mpitrain.launch.ending import Ended
from mpitrain.launch.intake import Intake
from mpitrain.launch.policy import Change, Limits
from mpitrain.launch.supervisor import supervise
from mpitrain.watching.rank_record import RankRecord


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


@pytest.mark.parametrize(("supervised", "limits"), [(elastic, Limits(5, 3, 3)), (plain, Limits(5, 3))])
def test_it_saves_where_too_few_hosts_are_left(
    supervised: Callable[[Tries, Limits, Wished], int], limits: Limits, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = f"only a, b of a, b, c can take part, and {limits.words}"
    tries, wished = Tries(lost("c", 7), left(6)), Wished(None, None)
    assert supervised(tries, limits, wished) == 1
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "b"]]
    assert wished.saves_for == ["", reason]
    assert tries.only_saves == [False, True]
    assert wished.left_for == []
    begins = (
        f"mpitrain: try 1 of 6 failed at step 7: c fell silent; {reason}. Starting again on a, b only to save the s"
    )
    assert capsys.readouterr().err == (
        f"{begins}tate\nmpitrain: {reason}: the job has ended after step 6, which is saved\n"
    )
    # The job saves only if there is a state and a try is left.
    for ended, restarts in ((lost("c", 0), 5), (lost("c", 7), 0)):
        tries, wished = Tries(ended), Wished(None)
        assert supervised(tries, replace(limits, restarts=restarts), wished) == 1
        assert (len(tries.ran), wished.left_for) == (1, [])
    # Another host is found absent meanwhile.
    tries = Tries(lost("c", 7), absent("b"), left(6))
    assert supervised(tries, limits, Wished(None, None, None)) == 1
    assert [list(ran) for ran in tries.ran] == [["a", "b", "c"], ["a", "b"], ["a"]]
    assert tries.only_saves == [False, True, True]
    # The training was complete, and the script has come to its end.
    assert supervised(Tries(lost("c", 7), Ended(0)), limits, Wished(None, None)) == 0


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (lost("b", 0), "b fell silent"),
        (killed(1, 0, 5), "rank 1 on a was killed by signal 9"),
        (LaunchError("no mpiexec"), "no mpiexec"),
    ],
)
def test_it_saves_once_and_leaves_its_state_otherwise(
    second: Ended | LaunchError, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is that of the failure, whatever ends the try that only saves. No restart is left after it."""
    reason = "only a, b of a, b, c can take part, and --min-nodes is 3"
    for kept in ("it is kept on a", "no host has the state in memory; the same command goes on from the newest"):
        tries, wished = Tries(lost("c", 7), second), Wished(None, None)
        if not kept.startswith("it"):
            wished.left_for = ["before"]
        assert plain(tries, Limits(1, 3), wished) == 1
        assert len(tries.ran) == 2
        assert wished.left_for[-1:] == [reason]
        said = capsys.readouterr().err.splitlines()
        assert said[1] == f"mpitrain: {reason}; the state was not saved: {why}"
        assert said[2].startswith(f"mpitrain: {kept}")


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
