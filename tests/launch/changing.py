"""Shared by the tests of changes and of the launcher's socket: a job that trains on three hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch.changes import Changes, Tellers
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.orders import Orders
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.policy import Change, Limits

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
HOSTS = Placement((Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), ADDRESSES, own="a")


def widen(placement: Placement, text: str) -> Placement:
    if text == "nowhere":
        raise ConfigError("there is no host 'nowhere'")
    places = (*placement.places, Place(text, placement.num_ranks, 2))
    return Placement(places, {**ADDRESSES, text: "10.0.0.9"}, placement.own)


class Asked:
    """A stand-in for the check of hosts that want to join."""

    def __init__(self) -> None:
        self.placements: list[Placement] = []

    def __call__(self, placement: Placement) -> None:
        self.placements.append(placement)
        if "slow" in placement.hosts:
            time.sleep(3)
        if "odd" in placement.hosts:
            raise RuntimeError("can't start new thread")
        if "other" in placement.hosts:
            raise LaunchError("other: train.py differs")


class NextTry:
    """A stand-in for a Successor. The test sets its attributes."""

    def __init__(self) -> None:
        self.problem, self.has_room, self.is_ready, self.is_closed, self.looks = "", True, False, False, 0
        self.faulty: tuple[str, ...] = ()

    def look(self) -> None:
        self.looks += 1

    def close(self) -> None:
        self.is_closed = True


Prepared = list[tuple[tuple[str, ...], str, NextTry]]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def prepared() -> Prepared:
    """The prepared tries: for each, its hosts, the reason, and the try itself."""
    return []


@pytest.fixture
def changes(asked: Asked, keepers: Keepers, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> Iterator[Changes]:
    monkeypatch.setattr("mpitrain.launch.changes._BEGIN_SECONDS", 0.1)

    def prepare(where: Placement, cause: str) -> Any:
        if "alone" in where.hosts:
            return None
        prepared.append((where.hosts, cause, NextTry()))
        return prepared[-1][2]

    with Changes(keepers, Limits(5, 2), widen, asked, prepare) as changes, Tellers(Orders(), changes):
        train(changes, keepers, HOSTS)
        yield changes


def train(changes: Changes, keepers: Keepers, now_on: Placement, hosts: Placement = HOSTS) -> None:
    changes.begin(hosts, now_on)
    keepers.run = 1


def taken(changes: Changes, **how: bool) -> Change:
    """The change that the launcher carries out."""
    change = changes.take(**how)
    assert change is not None
    return change


def told(keepers: Keepers, *ranks: int) -> None:
    """SIGTERM told these ranks to end some time ago."""
    keepers.told = dict.fromkeys(ranks, 0.0)
