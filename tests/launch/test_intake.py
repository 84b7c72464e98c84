"""Hosts that an elastic job takes in by itself. A program stands for ssh, because there are no other hosts here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import until
from mpitrain.errors import LaunchError
from mpitrain.launch.changes import Changes
from mpitrain.launch.ending import Ended
from mpitrain.launch.hosts import listed_hosts
from mpitrain.launch.intake import DIFFERENT_SECONDS, FIRST_SECONDS, MOST_SECONDS, Intake
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import PREPARES, SAVES, STAYS
from mpitrain.launch.logins import that_let_in
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.processes import alive_below
from mpitrain.launch.supervisor import Pause, supervise
from mpitrain.launch.verdict import ASIDE_SECONDS, FailedTry, Limits
from mpitrain.watching.rank_record import RankRecord

# The host is the last word but one. A host is up if a file has its name; `slow` connects and says no more.
SSH = """#!/bin/sh
for word; do host=$before; before=$word; done
echo "$host" >> {folder}/asked
case $host in slow*) exec sleep 1000 ;; esac
[ -e {folder}/up/$host ] && exit 0
echo "No route to host" >&2
exit 255
"""
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
HOSTS = Placement((Place("a", 0, 2), Place("b", 2, 2), Place("c", 4, 2)), ADDRESSES, own="a")
WITHOUT_B = HOSTS.without({"b"})
LIMITS = Limits(restarts=5, min_nodes=2, max_nodes=4)


class Ssh:
    """Stands for ssh: knows which hosts are up, and which were asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "up").mkdir()
        program = folder / "bin/ssh"
        program.parent.mkdir()
        program.write_text(SSH.format(folder=folder))
        program.chmod(0o755)

    def up(self, *hosts: str) -> None:
        for host in hosts:
            (self._folder / "up" / host).touch()

    def asked(self) -> list[str]:
        path = self._folder / "asked"
        return path.read_text().split() if path.exists() else []


class Comparison:
    """Stands for the comparison of hosts that would join."""

    def __init__(self) -> None:
        self.different: dict[str, str] = {}
        self.hosts: list[tuple[str, ...]] = []

    def __call__(self, placement: Placement) -> None:
        self.hosts.append(placement.hosts)
        if different := {host: text for host, text in self.different.items() if host in placement.hosts}:
            error = LaunchError("they differ")
            error.different = different
            raise error


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return Ssh(tmp_path)


@pytest.fixture
def comparison() -> Comparison:
    return Comparison()


def widen(placement: Placement, text: str) -> Placement:
    for item in text.split(","):
        host = item.partition("/")[0]
        place = Place(host, placement.num_ranks, 2)
        placement = Placement((*placement.places, place), {**placement.addresses, host: f"10.0.0.{ord(host)}"}, "a")
    return placement


@pytest.fixture
def changes(keepers: Keepers, comparison: Comparison) -> Iterator[Changes]:
    with Changes(keepers, LIMITS, widen, comparison, lambda where, cause: None) as changes:
        yield changes


@pytest.fixture
def intake(changes: Changes, ssh: Ssh) -> Intake:
    return Intake(changes, LIMITS, lambda: None)  # not entered: each test looks by itself


def trains(
    changes: Changes,
    intake: Intake,
    keepers: Keepers,
    now_on: Placement,
    *failures: FailedTry,
    hosts: Placement = HOSTS,
) -> None:
    """A try trains on some hosts, after these failures."""
    changes.begin(hosts, now_on)
    intake.begin(hosts, now_on, failures)
    keepers.run = 1


def lost(when: float, host: str = "b") -> FailedTry:
    return FailedTry(f"{host} fell silent", 1, when, step=7, lost=(host,))


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
    assert len(ssh.asked()) == 4  # it has all hosts that it may have


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
    trains(changes, intake, keepers, HOSTS)  # it has joined by a wish
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
    """It is asked again later, each time after a longer time."""
    ssh.up("b")
    trains(changes, intake, keepers, WITHOUT_B)
    now, wait = 1000.0, FIRST_SECONDS
    for num_asked in range(1, 4):
        intake.look(now)
        assert keepers.wish == PREPARES
        changes._change, keepers.wish = None, STAYS  # it is dropped
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


# -- the inventory ---------------------------------------------------------------------------------------------


def inventory(path: Path, *hosts: str) -> None:
    head, *workers = [f"{host} ansible_host=127.0.0.{ord(host)}" for host in hosts]
    new = path.with_name("new")
    new.write_text("\n".join(["[head]", head, "[workers]", *workers, "[cluster:children]", "head", "workers", ""]))
    new.replace(path)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """An inventory with a, b and c."""
    inventory(tmp_path / "hosts", "a", "b", "c")
    return tmp_path / "hosts"


def test_the_inventory_changes(
    changes: Changes, keepers: Keepers, ssh: Ssh, listed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intake = Intake(changes, LIMITS, listed_hosts(None, listed))
    ssh.up("b", "d")
    trains(changes, intake, keepers, HOSTS)
    intake.look(1000.0)
    assert ssh.asked() == []
    inventory(listed, "a", "b", "c", "d")
    intake.look(1001.0)
    joins = changes.take()
    assert joins is not None
    assert joins.now_on.hosts == ("a", "b", "c", "d")
    trains(changes, intake, keepers, joins.now_on, hosts=joins.hosts)
    inventory(listed, "a", "c", "d")
    intake.look(1002.0)
    assert keepers.wish == PREPARES
    leaves = changes.take()
    assert leaves is not None
    assert (leaves.text, leaves.now_on.hosts) == ("b leaves (not in the inventory any more)", ("a", "c", "d"))
    assert intake.dropped == {"b"}
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: d answers; d joins after the next copy of the state, and then it goes on on a, b, c, d",
        "mpitrain: b leaves (not in the inventory any more); after the next copy of the state, it goes on on a, c, d",
    ]
    trains(changes, intake, keepers, leaves.now_on, hosts=leaves.hosts)
    inventory(listed, "a", "b", "c", "d")
    intake.look(1003.0)
    again = changes.take()
    assert again is not None
    assert (again.joined, intake.dropped) == (("b",), set())


def test_too_few_are_left_in_the_inventory(changes: Changes, keepers: Keepers, ssh: Ssh, listed: Path) -> None:
    intake = Intake(changes, LIMITS, listed_hosts(None, listed))
    trains(changes, intake, keepers, HOSTS)
    inventory(listed, "a")
    intake.look(1000.0)
    assert keepers.wish == SAVES
    change = changes.take()
    assert change is not None
    assert change.is_end
    assert change.text == "b, c can no longer take part (not in the inventory any more), and --elastic is 2:4"


def test_a_host_that_has_left_by_a_wish_stays_away(changes: Changes, keepers: Keepers, ssh: Ssh, listed: Path) -> None:
    intake = Intake(changes, LIMITS, listed_hosts(None, listed))
    ssh.up("b", "d")
    trains(changes, intake, keepers, HOSTS)
    inventory(listed, "a", "b", "c", "d")
    intake.look(1000.0)
    change = changes.take()
    assert change is not None
    trains(changes, intake, keepers, change.now_on, hosts=change.hosts)
    change = changes.accept({"leave": ["b", "d"]})
    changes.take()
    trains(changes, intake, keepers, change.now_on, hosts=change.hosts)
    intake.look(1e6)
    assert ssh.asked() == ["d"]
    assert keepers.wish == STAYS


def test_wishes_to_the_launcher_before(
    changes: Changes, keepers: Keepers, ssh: Ssh, listed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """b has left, and d has joined, which the inventory does not have. The launcher that resumes the job keeps that."""
    ssh.up("b", "d")
    intake = Intake(changes, LIMITS, listed_hosts(None, listed))
    hosts = widen(WITHOUT_B, "d")
    trains(changes, intake, keepers, hosts, hosts=hosts)
    intake.look(1000.0)
    assert (ssh.asked(), intake.dropped, keepers.wish) == ([], set(), STAYS)
    assert capsys.readouterr().err == ""
    inventory(listed, "a", "b")
    intake.look(1001.0)
    change = changes.take()
    assert change is not None
    assert change.text == "c leaves (not in the inventory any more)"


def test_an_inventory_that_cannot_be_read(
    changes: Changes, keepers: Keepers, ssh: Ssh, listed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intake = Intake(changes, LIMITS, listed_hosts(None, listed))
    trains(changes, intake, keepers, HOSTS)
    text = listed.read_text()
    listed.write_text("[head]\n")
    intake.look(1000.0)
    intake.look(1001.0)
    said = capsys.readouterr().err
    assert said.startswith("mpitrain: the hosts of the job stay as they are, because the inventory cannot be read: ")
    assert said.count("\n") == 1
    assert (keepers.wish, intake.dropped) == (STAYS, set())
    listed.write_text(text)
    intake.look(1002.0)
    listed.unlink()
    intake.look(1003.0)
    assert "No such file" in capsys.readouterr().err


# -- with the supervisor ---------------------------------------------------------------------------------------


def test_a_host_that_comes_and_goes(
    changes: Changes, intake: Intake, keepers: Keepers, ssh: Ssh, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is taken in twice, and no more after the third loss. The time between its losses is made long here."""
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


# -- the question ----------------------------------------------------------------------------------------------


def test_those_that_answer(ssh: Ssh, capfd: pytest.CaptureFixture[str]) -> None:
    ssh.up("b", "d")
    assert that_let_in(["b", "c", "d"], threading.Event()) == {"b", "d"}
    assert sorted(ssh.asked()) == ["b", "c", "d"]
    assert capfd.readouterr() == ("", "")


def test_one_that_never_answers_is_not_waited_for(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.launch.logins._ANSWER_SECONDS", 0.0)
    before = alive_below(set())
    assert that_let_in(["slow"], threading.Event()) == set()
    assert alive_below(set()) == before


def test_the_question_is_no_process_of_the_job(ssh: Ssh) -> None:
    """Else a job that ends meanwhile would kill it as its own, and fail."""
    stop = threading.Event()
    results: list[set[str]] = []
    asking = threading.Thread(target=lambda: results.append(that_let_in(["slow1", "slow2"], stop)))
    before = alive_below(set())
    asking.start()
    until(lambda: len(ssh.asked()) == 2)
    assert alive_below(set()) == before
    stop.set()
    asking.join()
    assert results == [set()]
    assert alive_below(set()) == before
