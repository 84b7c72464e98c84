"""Facts that are still being asked for when the next try starts: whether it waits for them, or asks anew."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import HANG_SECONDS
from mpitrain.launch import tries
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.tries import Tries
from mpitrain.watching.rank_record import RankRecord

BOTH = Placement((Place("a", 0, 1), Place("b", 1, 1)), own="a")


class Asking:
    """A stand-in for a JobOverHosts whose hosts answer when `answer` is set."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(placement=BOTH)
        records = {0: RankRecord(0, step=2, first_step=1)}
        self.guards = SimpleNamespace(processes=set, keep=lambda: None, records=lambda: records)
        self.answer = threading.Event()

    def connect(self, keepers: None, *, is_idle: bool) -> None:
        assert (keepers, is_idle) == (None, True)

    def ask(self) -> None:
        self.answer.wait(HANG_SECONDS)

    def becomes(self, job: Any) -> bool:
        return True


@pytest.mark.parametrize(("lost", "waits"), [(set(), True), ({"b"}, False)])
def test_the_next_try_waits_for_facts(lost: set[str], waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for long, if a host was lost: it may be this one that does not answer."""
    monkeypatch.setattr(tries, "_FACTS_SECONDS", 0.0)
    job = Asking()

    def make(stack: ExitStack, _: object) -> Any:
        stack.callback(job.answer.set)  # without its connections `ask` ends
        return job

    keepers: Any = SimpleNamespace()
    present: Any = job
    wanted: Any = SimpleNamespace(placement=BOTH.without(lost))
    with ExitStack() as stack, Tries(make, keepers, None) as made:
        made._look(present)
        if waits:
            later = threading.Timer(0.2, job.answer.set)
            stack.callback(later.cancel)
            later.start()
        assert (made._take(stack, wanted) is present) == waits
