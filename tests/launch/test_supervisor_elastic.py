"""The supervisor of an elastic job: the hosts on which it starts, goes on or only saves its state."""

from __future__ import annotations

import pytest
from supervising import JOINS, PLACEMENT, Tries, Wished, absent, killed, left

from mpitrain.errors import LaunchError
from mpitrain.launch.change import Change
from mpitrain.launch.ending import Ended
from mpitrain.launch.intake import Intake
from mpitrain.launch.supervisor import supervise
from mpitrain.launch.verdict import Limits
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
    # The job saves only once, and only if there is a state and a try is left.
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
