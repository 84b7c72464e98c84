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


class NextTry:
    """A stand-in for a Successor. The test sets its attributes."""

    def __init__(self, hosts: tuple[str, ...], cause: str) -> None:
        self.hosts, self.cause = hosts, cause
        self.problem, self.has_room, self.is_ready, self.is_closed, self.looks = "", True, False, False, 0
        self.faulty: tuple[str, ...] = ()

    def look(self) -> None:
        self.looks += 1

    def close(self) -> None:
        self.is_closed = True


class ChangingJob:
    """A job that trains: its changes, its keepers, the hosts that were asked to join, and the prepared tries."""

    def __init__(self, keepers: Keepers) -> None:
        self.keepers, self.asked, self.prepared = keepers, list[Placement](), list[NextTry]()
        self.changes = Changes(keepers, Limits(5, 2), widen, self._check, self._prepare)

    def _check(self, placement: Placement) -> None:
        self.asked.append(placement)
        if "slow" in placement.hosts:
            time.sleep(3)
        if "odd" in placement.hosts:
            raise RuntimeError("can't start new thread")
        if "other" in placement.hosts:
            raise LaunchError("other: train.py differs")

    def _prepare(self, where: Placement, cause: str) -> Any:
        if "alone" in where.hosts:
            return None
        self.prepared.append(NextTry(where.hosts, cause))
        return self.prepared[-1]

    def train(self, now_on: Placement = HOSTS, hosts: Placement = HOSTS) -> None:
        """An attempt begins."""
        self.changes.begin(hosts, now_on)
        self.keepers.run = 1

    def answer(self, **wish: Any) -> dict[str, str]:
        return self.changes.answer(wish)

    def accept(self, **wish: Any) -> NextTry | None:
        """It accepts a wish, and prepares the next attempt, if one may be prepared."""
        assert "accepted" in self.answer(**wish)
        self.changes.look()
        return self.prepared[-1] if self.prepared else None

    def taken(self, **how: bool) -> Change:
        """The change that the launcher carries out."""
        change = self.changes.take(**how)
        assert change is not None
        return change

    def told(self, *ranks: int) -> None:
        """SIGTERM told these ranks to end some time ago."""
        self.keepers.told = dict.fromkeys(ranks, 0.0)


@pytest.fixture
def job(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChangingJob]:
    monkeypatch.setattr("mpitrain.launch.changes._BEGIN_SECONDS", 0.1)
    job = ChangingJob(keepers)
    with job.changes, Tellers(Orders(), job.changes):
        job.train()
        yield job
