"""A next try that cannot take over names the hosts to blame, and passes on a signal that ends the whole job."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import until
from mpitrain.errors import LaunchError
from mpitrain.launch.ending import Ended
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.successor import Successor
from mpitrain.watching.rank_record import FAILED, RankRecord

HERE = Placement((Place("here", 0, 2),), own="here")


class NextJob:
    """A stand-in for a JobOverHosts and its Run. Its ranks end at once, or it cannot even be started."""

    def __init__(self, end: Ended | LaunchError) -> None:
        self.job = SimpleNamespace(placement=HERE)
        self.guards = SimpleNamespace(processes=set, records=dict)
        self._end = end

    def connect(self, keepers: Keepers | None) -> None:
        assert keepers is None

    def ask(self) -> None:
        if isinstance(self._end, LaunchError):
            raise self._end

    def ready(self) -> NextJob:
        return self

    def start(self) -> None:
        pass

    def beside(self) -> bool:
        return False

    def to_end(self) -> Ended:
        assert isinstance(self._end, Ended)
        return self._end


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    with Keepers("here", f"mpitrain-test-{secrets.token_hex(8)}") as keepers:
        yield keepers


def ended(keepers: Keepers, end: Ended | LaunchError) -> Successor:
    """A successor that knows that its job has ended in this way."""
    job: Any = NextJob(end)
    successor = Successor(lambda stack: job, keepers, None, lambda stack, job, meanwhile: meanwhile)
    try:
        until(lambda: successor.look() or successor.problem)
    finally:
        successor.close()
    return successor


def refused(hosts: tuple[str, ...], different: dict[str, str]) -> LaunchError:
    error = LaunchError("these hosts cannot take part")
    error.hosts, error.different = hosts, different
    return error


@pytest.mark.parametrize(
    ("end", "faulty"),
    [
        (Ended(1, lost=("there",)), ("there",)),
        (Ended(1, failed=RankRecord(1, phase=FAILED, error="no memory is left")), ("here",)),
        (Ended(1, trouble=("nobody knows",)), ()),
        (Ended(0), ()),
        (refused(("b",), {"c": "train.py differs"}), ("b", "c")),
        (refused((), {}), ()),
    ],
)
def test_because_of_which_hosts_it_cannot_take_over(
    keepers: Keepers, end: Ended | LaunchError, faulty: tuple[str, ...]
) -> None:
    assert ended(keepers, end).faulty == faulty


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_for_the_whole_job(keepers: Keepers, number: signal.Signals) -> None:
    """The signal comes just while the successor handles the end of the next try."""
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in numbers}
    try:
        ended(keepers, Ended(128 + number, is_interrupted=True))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert heard == [number]
