"""Hosts that an elastic job takes in by itself, and an inventory that changes. A program stands for ssh."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import program

from jobs import until
from mpitrain.errors import LaunchError
from mpitrain.launch.changes import Changes
from mpitrain.launch.ending import Ended
from mpitrain.launch.hosts import listed_hosts
from mpitrain.launch.intake import DIFFERENT_SECONDS, FIRST_SECONDS, MOST_SECONDS, Intake, that_let_in
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import ASIDE_SECONDS, Change, FailedTry, Limits
from mpitrain.launch.processes import alive_below
from mpitrain.launch.supervisor import Pause, supervise
from mpitrain.watching.rank_record import RankRecord

# The host is the second-to-last word. A host is up if a file has its name. `slow` connects, and then says nothing.
SSH = """
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


class Site:
    """A job that trains on some of its hosts; ssh, which knows which hosts are up; and how these hosts differ."""

    def __init__(self, folder: Path, keepers: Keepers) -> None:
        self._folder, self.keepers = folder, keepers
        (folder / "up").mkdir()
        program(folder / "bin/ssh", SSH.format(folder=folder))
        self.different: dict[str, str] = {}
        self.compared: list[tuple[str, ...]] = []
        self.changes = Changes(keepers, LIMITS, widen, self._compare, lambda where, cause: None)
        self.listed = folder / "hosts"
        self.list("a", "b", "c")
        self.intake = Intake(self.changes, LIMITS, lambda: None)  # not entered: each test calls look() itself

    def _compare(self, placement: Placement) -> None:
        self.compared.append(placement.hosts)
        if different := {host: text for host, text in self.different.items() if host in placement.hosts}:
            error = LaunchError("they differ")
            error.different = different
            raise error

    def up(self, *hosts: str) -> None:
        for host in hosts:
            (self._folder / "up" / host).touch()

    def asked(self) -> list[str]:
        path = self._folder / "asked"
        return path.read_text().split() if path.exists() else []

    def list(self, *hosts: str) -> None:
        """Write an inventory with these hosts."""
        head, *workers = [f"{host} ansible_host=127.0.0.{ord(host)}" for host in hosts]
        lines = ["[head]", head, "[workers]", *workers, "[cluster:children]", "head", "workers", ""]
        new = self.listed.with_name("new")
        new.write_text("\n".join(lines))
        new.replace(self.listed)

    def train(self, now_on: Placement, *failures: FailedTry, hosts: Placement = HOSTS) -> None:
        """Begin an attempt on some of the hosts, after these failures."""
        self.changes.begin(hosts, now_on)
        self.intake.begin(hosts, now_on, failures)
        self.keepers.run = 1

    def taken(self, *, goes_on: bool = False) -> Change:
        change = self.changes.take()
        if goes_on:
            self.train(change.now_on, hosts=change.hosts)
        return change


@pytest.fixture
def site(tmp_path: Path, keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    site = Site(tmp_path, keepers)
    with site.changes:
        yield site


@pytest.fixture
def listing(site: Site) -> Site:
    """The same for a job that is started with an inventory, of a, b and c."""
    site.intake = Intake(site.changes, LIMITS, listed_hosts(None, site.listed))
    return site


def widen(placement: Placement, text: str) -> Placement:
    for item in text.split(","):
        host = item.partition("/")[0]
        place = Place(host, placement.num_ranks, 2)
        placement = Placement((*placement.places, place), {**placement.addresses, host: f"10.0.0.{ord(host)}"}, "a")
    return placement


def lost(when: float) -> FailedTry:
    return FailedTry("b fell silent", 1, when, step=7, lost=("b",))


def test_a_host_that_answers_again(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.train(WITHOUT_B, lost(100.0))
    now = 100.0 + ASIDE_SECONDS
    site.intake.look(now - 1)
    assert site.asked() == []
    wait = FIRST_SECONDS
    for num_asked in range(1, 9):
        site.intake.look(now)
        site.intake.look(now + wait - 1)  # not yet
        assert site.asked() == ["b"] * num_asked
        now, wait = now + wait, min(2 * wait, MOST_SECONDS)
    assert wait == MOST_SECONDS
    assert capsys.readouterr().err == ""
    site.up("b")
    site.intake.look(now)
    assert site.keepers.wish == PREPARES
    follows = "b joins after the next copy of the state, and then it continues on a, c, b"
    assert capsys.readouterr().err == f"mpitrain: b answers; {follows}\n"
    site.intake.look(now + 10 * MOST_SECONDS)  # a change is under way
    assert site.asked() == ["b"] * 9
    change = site.taken()
    assert (change.joined, change.now_on.hosts) == (("b",), ("a", "c", "b"))


def test_only_while_hosts_can_change(site: Site) -> None:
    site.train(WITHOUT_B)
    for run, is_ending in ((0, False), (2, False), (1, True)):
        site.keepers.run, site.keepers.is_ending = run, is_ending
        site.intake.look(1000.0)
    site.changes.take()
    site.keepers.run, site.keepers.is_ending = 1, False
    site.intake.look(1000.0)
    assert site.asked() == []
    site.changes.begin(HOSTS, WITHOUT_B)
    site.keepers.run = 1
    site.intake.look(1000.0)
    assert site.asked() == ["b"]


def test_several_hosts_join_as_far_as_there_is_room(site: Site) -> None:
    site.up("d", "e", "f")
    site.train(HOSTS.without({"c"}), hosts=widen(HOSTS, "d,e,f"))
    site.intake.look(1000.0)
    assert sorted(site.asked()) == ["c", "d", "e", "f"]
    change = site.taken(goes_on=True)
    assert change.now_on.hosts == ("a", "b", "d", "e")
    assert set(change.hosts.hosts) == {"a", "b", "c", "d", "e", "f"}
    site.intake.look(9000.0)
    assert len(site.asked()) == 4  # the job has as many hosts as it may have
    why = "it would run on 6 hosts, and --nnodes is 2:4; `mpitrain scale JOB -HOST` makes room"
    assert site.changes.answer({"join": "g,h"}) == {"refused": why}
    why = "only 1 of its hosts would be left, and --nnodes is 2:4; `mpitrain kill` ends a job"
    assert site.changes.answer({"leave": ["b", "d", "e"]}) == {"refused": why}


def test_a_host_that_differs(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.up("b")
    site.different["b"] = "train.py differs"
    site.train(WITHOUT_B)
    for now in (1000.0, 1000.0 + DIFFERENT_SECONDS - 1, 1000.0 + DIFFERENT_SECONDS):
        site.intake.look(now)
    assert site.compared == [("b",), ("b",)]
    said = "mpitrain: b cannot take part: train.py differs. It is asked again in 10 minutes\n"
    assert capsys.readouterr().err == said
    site.different["b"] = "numpy 2.3.1, here 2.4.6"
    site.intake.look(1000.0 + 2 * DIFFERENT_SECONDS)
    assert "b cannot take part: numpy 2.3.1, here 2.4.6." in capsys.readouterr().err
    assert site.keepers.wish == STAYS
    site.different.clear()
    site.train(HOSTS)  # b has joined by a wish
    site.train(WITHOUT_B, lost(1000.0 + 2 * DIFFERENT_SECONDS))
    site.intake.look(1000.0 + 2 * DIFFERENT_SECONDS + ASIDE_SECONDS)
    assert site.keepers.wish == PREPARES


def test_a_host_that_differs_does_not_keep_others_out(site: Site) -> None:
    site.up("b", "d")
    site.different["b"] = "train.py differs"
    site.train(WITHOUT_B, hosts=widen(HOSTS, "d"))
    site.intake.look(1000.0)
    site.intake.look(1001.0)
    assert site.taken().joined == ("d",)


def test_a_host_that_did_not_join_because_of_another_one(site: Site) -> None:
    """The host is asked again, each time after a longer wait."""
    site.up("b")
    site.train(WITHOUT_B)
    now, wait = 1000.0, FIRST_SECONDS
    for num_asked in range(1, 4):
        site.intake.look(now)
        assert site.keepers.wish == PREPARES
        site.changes._change, site.keepers.wish = None, STAYS  # the change is dropped
        site.intake.look(now + wait - 1)  # not yet
        assert site.asked() == ["b"] * num_asked
        now, wait = now + wait, 2 * wait


def test_the_end_of_patience(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A host is lost, cannot join, and is lost again."""
    site.up("b")
    site.changes.bad.append((200.0, "b"))
    site.train(WITHOUT_B, lost(100.0))
    site.intake.look(200.0 + 2 * ASIDE_SECONDS - 1)
    assert site.asked() == []
    site.train(WITHOUT_B, lost(100.0), lost(500.0))
    for now in (1e4, 1e5, 1e6):
        site.intake.look(now)
    assert site.asked() == []
    assert capsys.readouterr().err == (
        "mpitrain: b was found bad 3 times, and is not taken in again by itself; `mpitrain scale JOB +HOST` lets it "
        "in\n"
    )


def test_a_host_with_devices(site: Site) -> None:
    places = (Place("a", 0, 1, ("cuda:0",)), Place("b", 1, 2, ("cuda:0", "cuda:1")))
    hosts = Placement(places, {"a": "10.0.0.1", "b": "10.0.0.2"}, own="a")
    texts: list[str] = []
    site.changes._widen = lambda placement, text: texts.append(text) or widen(placement, "b")
    site.up("b")
    site.train(hosts.without({"b"}), hosts=hosts)
    site.intake.look(1000.0)
    assert texts == ["b/cuda:0,b/cuda:1"]


def test_a_host_that_comes_and_goes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The host is taken in twice, but not after its third loss. The test makes the time between the losses long."""
    site.up("b")
    tries: list[str] = []

    def run(placement: Placement, pause: Pause | None) -> Ended:
        tries.append("".join(placement.hosts))
        step = 10 * len(tries)
        records = {0: RankRecord(0, pid=1, first_step=step, step=step)}
        if "b" in placement.hosts:
            return Ended(1, lost=("b",), trouble=("b: no message",), records=records)
        site.keepers.run = 1
        # A time at which the host is no longer set aside, however often it was lost.
        site.intake.look(1e9)
        return Ended(0, records=records, left=(step, 1.0) if site.keepers.wish == PREPARES else None)

    assert supervise(run, HOSTS, LIMITS, site.changes, site.intake) == 0
    assert tries == ["abc", "ac", "acb", "ac", "acb", "ac"]
    said = capsys.readouterr().err
    assert said.count("b fell silent; starting again on a, c with 4 ranks, without b\n") == 3
    assert said.count("b joins after step ") == 2
    assert said.count("b was found bad 3 times, and is not taken in again by itself") == 1
    assert said.endswith("mpitrain: attempt 4 of 6 succeeded\n")


def test_the_inventory_changes(listing: Site, capsys: pytest.CaptureFixture[str]) -> None:
    listing.up("b", "d")
    listing.train(HOSTS)
    listing.intake.look(1000.0)
    assert listing.asked() == []
    listing.list("a", "b", "c", "d")
    listing.intake.look(1001.0)
    assert listing.taken(goes_on=True).now_on.hosts == ("a", "b", "c", "d")
    listing.list("a", "c", "d")
    listing.intake.look(1002.0)
    assert listing.keepers.wish == PREPARES
    leaves = listing.taken(goes_on=True)
    assert (leaves.text, leaves.now_on.hosts) == ("b leaves (not in the inventory any more)", ("a", "c", "d"))
    assert listing.intake.dropped == {"b"}
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: d answers; d joins after the next copy of the state, and then it continues on a, b, c, d",
        "mpitrain: b leaves (not in the inventory any more); after the next copy of the state, it continues on a, c, d",
    ]
    listing.list("a", "b", "c", "d")
    listing.intake.look(1003.0)
    assert (listing.taken().joined, listing.intake.dropped) == (("b",), set())


def test_too_few_are_left_in_the_inventory(listing: Site) -> None:
    listing.train(HOSTS)
    listing.list("a")
    listing.intake.look(1000.0)
    assert listing.keepers.wish == SAVES
    change = listing.taken()
    assert change.is_end
    assert change.text == "b, c can no longer take part (not in the inventory any more), and --nnodes is 2:4"


def test_a_host_that_has_left_by_a_wish_stays_away(listing: Site) -> None:
    listing.up("b", "d")
    listing.train(HOSTS)
    listing.list("a", "b", "c", "d")
    listing.intake.look(1000.0)
    listing.taken(goes_on=True)
    listing.changes.accept({"leave": ["b", "d"]})
    listing.taken(goes_on=True)
    listing.intake.look(1e6)
    assert (listing.asked(), listing.keepers.wish) == (["d"], STAYS)


def test_wishes_to_the_launcher_before(listing: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """b has left, and d, which is not in the inventory, has joined. The launcher that resumes the job keeps that."""
    listing.up("b", "d")
    hosts = widen(WITHOUT_B, "d")
    listing.train(hosts, hosts=hosts)
    listing.intake.look(1000.0)
    assert (listing.asked(), listing.intake.dropped, listing.keepers.wish) == ([], set(), STAYS)
    assert capsys.readouterr().err == ""
    listing.list("a", "b")
    listing.intake.look(1001.0)
    assert listing.taken().text == "c leaves (not in the inventory any more)"


def test_an_inventory_that_cannot_be_read(listing: Site, capsys: pytest.CaptureFixture[str]) -> None:
    listing.train(HOSTS)
    text = listing.listed.read_text()
    listing.listed.write_text("[head]\n")
    listing.intake.look(1000.0)
    listing.intake.look(1001.0)
    said = capsys.readouterr().err
    assert said.startswith("mpitrain: the hosts of the job stay as they are, because the inventory cannot be read: ")
    assert said.count("\n") == 1
    assert (listing.keepers.wish, listing.intake.dropped) == (STAYS, set())
    listing.listed.write_text(text)
    listing.intake.look(1002.0)
    listing.listed.unlink()
    listing.intake.look(1003.0)
    assert "No such file" in capsys.readouterr().err


def test_hosts_that_let_this_machine_log_in(
    site: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are asked at once. The question is no process of the job: one that ends meanwhile would kill it, and fail."""
    site.up("b", "d")
    assert that_let_in(["b", "c", "d"], threading.Event()) == {"b", "d"}
    assert sorted(site.asked()) == ["b", "c", "d"]
    assert capfd.readouterr() == ("", "")
    stop, results, before = threading.Event(), list[set[str]](), alive_below(set())
    asking = threading.Thread(target=lambda: results.append(that_let_in(["slow1", "slow2"], stop)))
    asking.start()
    until(lambda: len(site.asked()) == 5)
    assert alive_below(set()) == before
    stop.set()
    asking.join()
    monkeypatch.setattr("mpitrain.launch.intake._LOGIN_SECONDS", 0.0)  # one that never answers is not waited for
    results.append(that_let_in(["slow"], threading.Event()))
    assert results == [set(), set()]
    assert alive_below(set()) == before
