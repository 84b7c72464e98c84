"""The inventory of an elastic job changes: new hosts join, and hosts that are no longer listed leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import taking_in
from taking_in import HOSTS, LIMITS, WITHOUT_B, Ssh, trains, widen

from mpitrain.launch.changes import Changes
from mpitrain.launch.hosts import listed_hosts
from mpitrain.launch.intake import Intake
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import PREPARES, SAVES, STAYS

# Fixtures: pytest finds them by these names.
ssh, comparison, changes = taking_in.ssh, taking_in.comparison, taking_in.changes


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
    """b has left, and d, which is not in the inventory, has joined. The launcher that resumes the job keeps that."""
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
