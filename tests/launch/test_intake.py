"""Hosts that an elastic job takes in by itself. A program stands for ssh, because there are no other hosts here."""

from __future__ import annotations

import pytest
import taking_in
from taking_in import HOSTS, LIMITS, WITHOUT_B, Comparison, Ssh, lost, trains, widen

from mpitrain.launch.changes import Changes
from mpitrain.launch.ending import Ended
from mpitrain.launch.intake import DIFFERENT_SECONDS, FIRST_SECONDS, MOST_SECONDS, Intake
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import PREPARES, STAYS
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import ASIDE_SECONDS
from mpitrain.launch.supervisor import Pause, supervise
from mpitrain.watching.rank_record import RankRecord

# Fixtures: pytest finds them by these names.
ssh, comparison, changes, intake = taking_in.ssh, taking_in.comparison, taking_in.changes, taking_in.intake


def test_a_host_that_answers_again(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh, capsys: pytest.CaptureFixture[str]
) -> None:
    trains(changes, intake, keepers, WITHOUT_B, lost(100.0))
    now = 100.0 + ASIDE_SECONDS
    intake.look(now - 1)
    assert ssh.asked() == []
    wait, num_asked = FIRST_SECONDS, 0
    for _ in range(8):
        intake.look(now)
        num_asked += 1
        intake.look(now + wait - 1)  # not yet
        assert ssh.asked() == ["b"] * num_asked
        now, wait = now + wait, min(2 * wait, MOST_SECONDS)
    assert wait == MOST_SECONDS
    assert capsys.readouterr().err == ""
    ssh.up("b")
    intake.look(now)
    assert keepers.wish == PREPARES
    follows = "b joins after the next copy of the state, and then it goes on on a, c, b"
    assert capsys.readouterr().err == f"mpitrain: b answers; {follows}\n"
    intake.look(now + 10 * MOST_SECONDS)  # a change is under way
    assert ssh.asked() == ["b"] * (num_asked + 1)
    change = changes.take()
    assert change is not None
    assert (change.joined, change.now_on.hosts) == (("b",), ("a", "c", "b"))


def test_only_while_hosts_can_change(changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh) -> None:
    trains(changes, intake, keepers, WITHOUT_B)
    for run, is_ending in ((0, False), (2, False), (1, True)):
        keepers.run, keepers.is_ending = run, is_ending
        intake.look(1000.0)
    changes.take()
    keepers.run, keepers.is_ending = 1, False
    intake.look(1000.0)
    assert ssh.asked() == []
    changes.begin(HOSTS, WITHOUT_B)
    keepers.run = 1
    intake.look(1000.0)
    assert ssh.asked() == ["b"]


def test_several_hosts_join_as_far_as_there_is_room(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh
) -> None:
    hosts = widen(HOSTS, "d,e,f")
    ssh.up("d", "e", "f")
    trains(changes, intake, keepers, HOSTS.without({"c"}), hosts=hosts)
    intake.look(1000.0)
    assert sorted(ssh.asked()) == ["c", "d", "e", "f"]
    change = changes.take()
    assert change is not None
    assert change.now_on.hosts == ("a", "b", "d", "e")
    assert set(change.hosts.hosts) == {"a", "b", "c", "d", "e", "f"}
    trains(changes, intake, keepers, change.now_on, hosts=change.hosts)
    intake.look(9000.0)
    assert len(ssh.asked()) == 4  # the job has as many hosts as it may have


def test_a_host_that_differs(
    changes: Changes,
    intake: Intake,
    keepers: Keepers,
    ssh: Ssh,
    comparison: Comparison,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ssh.up("b")
    comparison.different["b"] = "train.py differs"
    trains(changes, intake, keepers, WITHOUT_B)
    for now in (1000.0, 1000.0 + DIFFERENT_SECONDS - 1, 1000.0 + DIFFERENT_SECONDS):
        intake.look(now)
    assert comparison.hosts == [("b",), ("b",)]
    assert capsys.readouterr().err == (
        "mpitrain: b cannot take part: train.py differs. It is asked again in 10 minutes\n"
    )
    comparison.different["b"] = "numpy 2.3.1, here 2.4.6"
    intake.look(1000.0 + 2 * DIFFERENT_SECONDS)
    assert "b cannot take part: numpy 2.3.1, here 2.4.6." in capsys.readouterr().err
    assert keepers.wish == STAYS
    comparison.different.clear()
    trains(changes, intake, keepers, HOSTS)  # b has joined by a wish
    trains(changes, intake, keepers, WITHOUT_B, lost(1000.0 + 2 * DIFFERENT_SECONDS))
    intake.look(1000.0 + 2 * DIFFERENT_SECONDS + ASIDE_SECONDS)
    assert keepers.wish == PREPARES


def test_a_host_that_differs_does_not_keep_others_out(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh, comparison: Comparison
) -> None:
    ssh.up("b", "d")
    comparison.different["b"] = "train.py differs"
    trains(changes, intake, keepers, WITHOUT_B, hosts=widen(HOSTS, "d"))
    intake.look(1000.0)
    intake.look(1001.0)
    change = changes.take()
    assert change is not None
    assert change.joined == ("d",)


def test_a_host_that_did_not_join_because_of_another_one(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh
) -> None:
    """The host is asked again, each time after a longer wait."""
    ssh.up("b")
    trains(changes, intake, keepers, WITHOUT_B)
    now, wait = 1000.0, FIRST_SECONDS
    for num_asked in range(1, 4):
        intake.look(now)
        assert keepers.wish == PREPARES
        changes._change, keepers.wish = None, STAYS  # the change is dropped
        intake.look(now + wait - 1)  # not yet
        assert ssh.asked() == ["b"] * num_asked
        now, wait = now + wait, 2 * wait


def test_the_end_of_patience(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host is lost, cannot join, and is lost again."""
    ssh.up("b")
    changes.bad.append((200.0, "b"))
    trains(changes, intake, keepers, WITHOUT_B, lost(100.0))
    intake.look(200.0 + 2 * ASIDE_SECONDS - 1)
    assert ssh.asked() == []
    trains(changes, intake, keepers, WITHOUT_B, lost(100.0), lost(500.0))
    for now in (1e4, 1e5, 1e6):
        intake.look(now)
    assert ssh.asked() == []
    assert capsys.readouterr().err == (
        "mpitrain: b was found bad 3 times, and is not taken in again by itself; `mpitrain join` lets it in\n"
    )


def test_a_wish_for_more_hosts_than_the_most(changes: Changes, intake: Intake, keepers: Keepers) -> None:
    trains(changes, intake, keepers, HOSTS)
    why = "it would run on 5 hosts, and --elastic is 2:4; `mpitrain leave` makes room for others"
    assert changes.answer({"join": "d,e"}) == {"refused": why}
    why = "only 1 of its hosts would be left, and --elastic is 2:4; `mpitrain kill` ends a job"
    assert changes.answer({"leave": ["b", "c"]}) == {"refused": why}


def test_a_host_with_devices(changes: Changes, keepers: Keepers, ssh: Ssh, intake: Intake) -> None:
    places = (Place("a", 0, 1, ("cuda:0",)), Place("b", 1, 2, ("cuda:0", "cuda:1")))
    hosts = Placement(places, {"a": "10.0.0.1", "b": "10.0.0.2"}, own="a")
    texts: list[str] = []

    def noted(placement: Placement, text: str) -> Placement:
        texts.append(text)
        return widen(placement, "b")

    changes._widen = noted
    ssh.up("b")
    trains(changes, intake, keepers, hosts.without({"b"}), hosts=hosts)
    intake.look(1000.0)
    assert texts == ["b/cuda:0,b/cuda:1"]


def test_a_host_that_comes_and_goes(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host is taken in twice, but not after its third loss. The test makes the time between the losses long."""
    ssh.up("b")
    tries: list[tuple[str, ...]] = []

    def run(placement: Placement, pause: Pause | None) -> Ended:
        tries.append(placement.hosts)
        step = 10 * len(tries)
        records = {0: RankRecord(0, pid=1, first_step=step, step=step)}
        if "b" in placement.hosts:
            return Ended(1, lost=("b",), trouble=("b: no message",), records=records)
        keepers.run = 1
        # A time at which the host is no longer set aside, however often it was lost.
        intake.look(1e9)
        return Ended(0, records=records, left=(step, 1.0) if keepers.wish == PREPARES else None)

    assert supervise(run, HOSTS, LIMITS, changes, intake) == 0
    assert tries == [("a", "b", "c"), ("a", "c"), ("a", "c", "b"), ("a", "c"), ("a", "c", "b"), ("a", "c")]
    said = capsys.readouterr().err
    assert said.count("b fell silent; starting again on a, c with 4 ranks, without b\n") == 3
    assert said.count("b joins after step ") == 2
    assert said.count("b was found bad 3 times, and is not taken in again by itself") == 1
    assert said.endswith("mpitrain: try 4 of 6 succeeded\n")
