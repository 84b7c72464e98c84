"""The supervisor starts a job again after a failure or a change of hosts. The attempts only say how they ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.ending import Ended
from mpitrain.launch.intake import Intake
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import Change, Limits
from mpitrain.launch.supervisor import Pause, supervise
from mpitrain.watching.rank_record import RankRecord

ABC = Placement(
    (Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, "a"
)
WIDER = Placement((*ABC.places, Place("d", 5, 2)), own="a")
LEAVES = Change("b leaves", ABC.without({"b"}), ABC.without({"b"}))
JOINS = Change("d joins", WIDER, WIDER, ("d",))
ENDS = Change("SIGTERM told rank 0 to end on a", ABC, ABC, is_end=True)
RETURNS = Change("b joins", ABC, ABC, ("b",))
FIVE = Limits(restarts=5)
DONE = Ended(0)


def killed(rank: int, step: int, code: int = 137, *, has_checkpoint: bool = False) -> Ended:
    about = {"first_step": 1, "has_checkpoint": has_checkpoint}
    records = {
        number: RankRecord(number, pid=1000 + number, step=step + (number != rank), **about) for number in range(5)
    }
    said = f"process rank {rank} with PID 1 on node b exited on\nsignal 9 (K)"
    return Ended(code, mpiexec_said=said, records=records)


def early(rank: int) -> Ended:
    """It fails before its first step."""
    failed = RankRecord(rank, pid=1, phase="failed", error="OSError: x")
    return Ended(1, failed=failed, records={rank: RankRecord(rank)})


def lost(host: str, step: int, first: int = 1) -> Ended:
    return Ended(1, lost=(host,), trouble=("-",), records={0: RankRecord(0, pid=1, first_step=first, step=step)})


def left(step: int) -> Ended:
    return Ended(0, records={0: RankRecord(0, step=step, left_step=step)}, left=(step, 1.0))


def absent(*hosts: str, **different: str) -> LaunchError:
    error = LaunchError("they differ" if different else "no answer")
    error.hosts, error.different = hosts, different
    return error


class Tries:
    """Ends each attempt as the test says, and records its hosts, what it was told of, and whether it only saves."""

    def __init__(self, *ends: Ended | LaunchError) -> None:
        self.ends = list(ends)
        self.ran: list[str] = []
        self.told: list[str] = []
        self.only_saves: list[bool] = []

    def __call__(self, placement: Placement, failed: Pause | None) -> Ended:
        self.told.append(failed.cause if failed else "")
        self.only_saves.append(failed is not None and failed.only_saves)
        self.ran.append("".join(placement.hosts))
        end = self.ends.pop(0)
        if isinstance(end, LaunchError):
            raise end
        return end


class Wished:
    """A stand-in for Changes that has a change after some of the attempts, and prepares no next attempt."""

    def __init__(self, *changes: Change | None) -> None:
        self.changes = list(changes)
        self.bad: list[tuple[float, str]] = []
        self.begun: list[tuple[str, str]] = []
        self.saves_for: list[str] = []
        self.left_for: list[str] = []

    def begin(self, hosts: Placement, now_on: Placement, saves_for: str) -> None:
        self.begun.append(("".join(hosts.hosts), "".join(now_on.hosts)))
        self.saves_for.append(saves_for)

    def take(self, *, has_left: bool = False) -> Change | None:
        return self.changes.pop(0) if self.changes else None

    def take_next(self, change: Change | None) -> Any:
        return None

    def leave_state(self, why: str) -> str:
        self.left_for.append(why)
        return "it is kept on a" if len(self.left_for) == 1 else ""

    def look(self) -> None:
        pass


def play(tries: Tries, limits: Limits, wished: Any = None) -> int:
    """Supervise tries. In those of an elastic job nobody looks for hosts."""
    intake = Intake(wished, limits, lambda: None) if limits.max_nodes else None
    return supervise(tries, ABC, limits, wished, intake)


@pytest.fixture
def transcript(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Makes attempts end as told: all have come. Returns the exit code, the hosts of each attempt, and the output."""

    def transcript(limits: Limits, *ends: Any, changes: Any = ()) -> str:
        tries = Tries(*ends)
        code = play(tries, limits, Wished(*changes) if changes else None)
        assert not tries.ends
        return f"{code} {' '.join(tries.ran)}\n" + capsys.readouterr().err.replace("mpitrain: ", "")

    return transcript


AFTER_FAILURES = """\
0 abc abc
attempt 1 of 6 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
attempt 2 of 6 succeeded
0 abc ac a
attempt 1 of 6, from step 4, failed at step 9: b fell silent; starting again on a, c with 4 ranks, without b
no answer; starting again on a with 2 ranks, without b, c
attempt 2 of 6 succeeded
5 abc abc
attempt 1 of 2 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
attempt 2 of 2 failed at step 8: rank 4 on c was killed by signal 9; not started again: no attempt is left
137 abc abc a
attempt 1 of 4 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
no answer; only a of a, b, c can take part, and the job needs 2. Starting again on a only to save the state
only a of a, b, c can take part, and the job needs 2: the job has ended after step 6, which is saved
137 abc abc
attempt 1 of 4 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
no answer; not started again: no host can take part, and the job needs 2
137 abc abc abc abc
attempt 1 of 4 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c
attempt 2 of 4 failed at step 8: rank 0 on a was killed by signal 9; starting again on a, b, c
attempt 3 of 4 failed at step 9: rank 2 on b was killed by signal 9; starting again on a, b, c
attempt 4 of 4 failed at step 10: rank 0 on a was killed by signal 9; not started again: no attempt is left
130 abc
0 abc
137 abc
137 abc
"""


def test_after_failures(transcript: Callable[..., str]) -> None:
    seen = transcript(FIVE, killed(2, 7), DONE)
    seen += transcript(FIVE, lost("b", 9, 5), absent("c"), DONE)
    seen += transcript(Limits(1), killed(2, 7, 137), killed(4, 8, 5))  # the code is that of the last failure
    seen += transcript(Limits(3, min_nodes=2), killed(2, 7), absent("b", "c"), left(6))
    seen += transcript(Limits(3, min_nodes=2), killed(2, 7), absent("a", "b", "c"))
    # Nobody has said how often: it depends on whether there is a checkpoint.
    seen += transcript(Limits(None), *(killed(2 * (step % 2), step, has_checkpoint=step == 7) for step in range(7, 11)))
    never = (
        (FIVE, Ended(130, is_interrupted=True)),
        (FIVE, DONE),
        (Limits(), killed(2, 7)),
        (Limits(None), killed(2, 7)),
    )
    for limits, end in never:
        seen += transcript(limits, end)  # which is never tried again
    assert seen == AFTER_FAILURES


def test_errors_that_no_other_try_would_change() -> None:
    for ends in ([absent("b")], [LaunchError("no ssh")], [killed(2, 7), LaunchError("the code differs")]):
        with pytest.raises(LaunchError):
            play(Tries(*ends), FIVE)


CHANGES = """\
0 abc ac abcd abcd
b leaves after step 7; continuing on a, c with 4 ranks
d joins after step 9; continuing on a, b, c, d with 7 ranks
attempt 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, b, c, d
attempt 2 of 2 succeeded
0 abc abcd abc
d joins after step 7; continuing on a, b, c, d with 7 ranks
the job continues as before, without d: no answer
0 abc abcd abc
d joins after step 7; continuing on a, b, c, d with 7 ranks
with d, the job failed before its first step: rank 5 on d failed: OSError: x
continuing as before, on a, b, c with 5 ranks
0 abc ac ac
b leaves after step 7; continuing on a, c with 4 ranks
attempt 1 of 2 failed before its first step: rank 0 on a failed: OSError: x; starting again on a, c
attempt 2 of 2 succeeded
0 abc ac
attempt 1 of 2 failed at step 7: rank 0 on a was killed by signal 9; starting again on a, c
attempt 2 of 2 succeeded
0 abc abc abc
the ranks had left after step 7; starting again on a, b, c with 5 ranks
attempt 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, b, c
attempt 2 of 2 succeeded
0 abc
the job ended before its hosts could change: b leaves
0 abc
the job ended before its hosts could change: SIGTERM told rank 0 to end on a
143 abc
SIGTERM told rank 0 to end on a: the job has ended after step 7
"""


def test_changes_of_hosts(transcript: Callable[..., str]) -> None:
    once = Limits(1)
    seen = transcript(once, left(7), left(9), killed(0, 12), DONE, changes=[LEAVES, JOINS])
    seen += transcript(once, left(7), absent("d"), DONE, changes=[JOINS])
    seen += transcript(once, left(7), early(5), DONE, changes=[JOINS])
    # The training has made steps before, so this fault does not come every time.
    seen += transcript(once, left(7), early(0), DONE, changes=[LEAVES])
    seen += transcript(once, killed(0, 7), DONE, changes=[LEAVES])
    # The change was dropped after the ranks had left: their exit code is 0, but the work is not done.
    seen += transcript(once, left(7), killed(0, 12), DONE, changes=[None])
    seen += transcript(once, DONE, changes=[LEAVES])
    seen += transcript(once, DONE, changes=[ENDS])
    seen += transcript(once, left(7), changes=[ENDS])
    assert seen == CHANGES


def test_a_try_is_told_why_it_follows() -> None:
    tries = Tries(left(7), left(9), killed(0, 12), DONE)
    play(tries, Limits(1), Wished(LEAVES, JOINS))
    assert tries.told == ["", "b leaves", "d joins", "rank 0 on a was killed by signal 9"]


def test_the_next_try_takes_over(capsys: pytest.CaptureFixture[str]) -> None:
    """The next attempt is not started again. After it fails, another attempt starts on its hosts."""

    class Successor:
        def to_end(self, meanwhile: object) -> Ended:
            return killed(0, 12)

    tries, wished = Tries(left(7), DONE), Wished(LEAVES)
    wanted: list[Change | None] = []
    wished.take_next = lambda change: wanted.append(change) or (Successor() if change else None)  # type: ignore[method-assign]
    assert play(tries, Limits(1), wished) == 0
    assert wanted == [LEAVES, None, None]
    assert tries.ran == ["abc", "ac"]
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: b leaves after step 7; continuing on a, c with 4 ranks",
        "mpitrain: attempt 1 of 2 failed at step 12: rank 0 on a was killed by signal 9; starting again on a, c",
        "mpitrain: attempt 2 of 2 succeeded",
    ]


def test_an_elastic_job_starts_on_the_hosts_that_can_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    for end, why in ((absent("b"), "no answer"), (absent(b="x.py differs"), "b cannot take part: x.py differs")):
        tries, wished = Tries(end, DONE), Wished()
        assert play(tries, Limits(5, 2, 3), wished) == 0
        assert tries.ran == ["abc", "ac"]
        assert wished.begun[-1] == ("abc", "ac")
        assert [host for _, host in wished.bad] == ["b"]
        assert capsys.readouterr().err.startswith(f"mpitrain: {why}; starting on a, c with 4 ranks, without b\n")
    assert play(Tries(absent("b", "c")), Limits(5, 2, 3), Wished()) == 1
    few = "mpitrain: no answer; not started: only a of a, b, c can take part, and --nnodes is 2:3\n"
    assert capsys.readouterr().err == few
    for error in (absent(a="x.py does not exist"), LaunchError("no ssh")):  # of this machine
        with pytest.raises(LaunchError):
            play(Tries(error), Limits(5, 1, 3), Wished())


def test_it_uses_no_more_hosts_than_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    tries = Tries(lost("b", 7), DONE)
    assert play(tries, Limits(5, 1, 2), Wished()) == 0
    assert tries.ran == ["ab", "ac"]
    assert "b fell silent; starting again on a, c with 4 ranks, without b\n" in capsys.readouterr().err


@pytest.mark.parametrize("most", [3, None])
def test_it_saves_where_too_few_hosts_are_left(most: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    limits = Limits(5, 3, most)
    reason = f"only a, b of a, b, c can take part, and {limits.words}"
    tries, wished = Tries(lost("c", 7), left(6)), Wished()
    assert play(tries, limits, wished) == 1
    assert (tries.ran, tries.only_saves) == (["abc", "ab"], [False, True])
    assert (wished.saves_for, wished.left_for) == (["", reason], [])
    assert capsys.readouterr().err == (
        f"mpitrain: attempt 1 of 6 failed at step 7: c fell silent; {reason}. Starting again on a, b only to save the "
        f"state\nmpitrain: {reason}: the job has ended after step 6, which is saved\n"
    )
    # The job saves only if there is a state and an attempt is left.
    for ended, restarts in ((lost("c", 0), 5), (lost("c", 7), 0)):
        tries, wished = Tries(ended), Wished()
        assert play(tries, Limits(restarts, 3, most), wished) == 1
        assert (len(tries.ran), wished.left_for) == (1, [])
    # Another host is found absent meanwhile.
    tries = Tries(lost("c", 7), absent("b"), left(6))
    assert play(tries, limits, Wished()) == 1
    assert (tries.ran, tries.only_saves) == (["abc", "ab", "a"], [False, True, True])
    # The training was complete, and the script has come to its end.
    assert play(Tries(lost("c", 7), DONE), limits, Wished()) == 0


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
    reason = "only a, b of a, b, c can take part, and the job needs 3"
    for before, kept in (
        ([], "it is kept on a"),
        (["-"], "no host has the state in memory; the same command continues from the newest"),
    ):
        tries, wished = Tries(lost("c", 7), second), Wished()
        wished.left_for = list(before)
        assert play(tries, Limits(1, 3), wished) == 1
        assert len(tries.ran) == 2
        assert wished.left_for[-1:] == [reason]
        said = capsys.readouterr().err.splitlines()
        assert said[1] == f"mpitrain: {reason}; the state was not saved: {why}"
        assert said[2].startswith(f"mpitrain: {kept}")


@pytest.mark.parametrize("end", [absent("d"), early(5)])
def test_a_host_that_could_not_join_is_taken_in_later(end: Ended | LaunchError) -> None:
    wished = Wished(JOINS)
    assert play(Tries(left(7), end, DONE), Limits(1, 1, 4), wished) == 0
    assert wished.begun[-1] == ("abcd", "abc")
    assert [host for _, host in wished.bad] == ["d"]


@pytest.mark.parametrize("limits", [FIVE, Limits(5, 1, 3)])
def test_a_host_that_has_joined_by_a_wish_is_no_longer_set_aside(limits: Limits) -> None:
    tries = Tries(lost("b", 7), left(9), killed(0, 12), DONE)
    assert play(tries, limits, Wished(None, RETURNS)) == 0
    assert tries.ran == ["abc", "ac", "abc", "abc"]
