"""Shared by the tests of hosts that join by themselves: a stand-in for ssh, and a job that trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.changes import Changes
from mpitrain.launch.intake import Intake
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import FailedTry, Limits

# The host is the second-to-last word. A host is up if a file has its name. `slow` connects, and then says nothing.
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
    """A stand-in for ssh. It knows which hosts are up, and records which hosts were asked."""

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
    """A stand-in for the comparison of hosts that would join."""

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
    return Intake(changes, LIMITS, lambda: None)  # not entered: each test calls look() itself


def trains(
    changes: Changes,
    intake: Intake,
    keepers: Keepers,
    now_on: Placement,
    *failures: FailedTry,
    hosts: Placement = HOSTS,
) -> None:
    """Begin a try that trains on some of the hosts, after these failures."""
    changes.begin(hosts, now_on)
    intake.begin(hosts, now_on, failures)
    keepers.run = 1


def lost(when: float, host: str = "b") -> FailedTry:
    return FailedTry(f"{host} fell silent", 1, when, step=7, lost=(host,))
