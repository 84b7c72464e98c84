"""The next attempt of a job: whether it waits for facts, who logs in when, and what it leaves to the supervisor."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.errors import LaunchError
from mpitrain.launch import attempts
from mpitrain.launch.attempts import Attempts
from mpitrain.launch.ending import Ended
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.live import Live
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.successor import Successor
from mpitrain.watching.rank_record import FAILED, RankRecord

BOTH = Placement((Place("a", 0, 1), Place("b", 1, 1)), {"a": "10.0.0.1", "b": "10.0.0.2"}, "a")


nothing: Any = None


class Asking:
    """A stand-in for a JobOverHosts whose hosts answer when `answer` is set."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(placement=BOTH)
        records = {0: RankRecord(0, facts={"step": 2}, first_step=1)}
        self.attempt = SimpleNamespace(keep=lambda: None, records=lambda: records)
        self.answer = threading.Event()
        self.logins: list[tuple[str, bool, bool]] = []  # what logs in, whether the hosts have answered, in which thread

    def make(self, stack: ExitStack, _: object) -> Any:
        stack.callback(self.answer.set)  # once its attempt has been left, `ask` ends: see test_watch.py
        return self

    def connect(self, keepers: None, *, is_idle: bool) -> None:
        assert (keepers, is_idle) == (None, True)
        self._log_in("agents")

    def open_ways(self) -> None:
        self._log_in("mpiexec")

    def _log_in(self, what: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self.logins.append((what, self.answer.is_set(), is_main))

    def ask(self) -> None:
        self.answer.wait(HANG_SECONDS)

    def becomes(self, job: Any) -> bool:
        return True


@pytest.mark.parametrize(("lost", "waits"), [(set(), True), ({"b"}, False)])
def test_the_next_try_waits_for_facts(lost: set[str], waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for long, if a host was lost: it may be this one that does not answer."""
    monkeypatch.setattr(attempts, "_FACTS_SECONDS", 0.0)
    job: Any = Asking()
    keepers: Any = SimpleNamespace()
    wanted: Any = SimpleNamespace(placement=BOTH.without(lost))
    with ExitStack() as stack, Attempts(nothing, job.make, keepers, None, Live("", [], 0.0)) as made:
        made._look(job)
        if waits:
            later = threading.Timer(0.2, job.answer.set)
            stack.callback(later.cancel)
            later.start()
        assert (made._take(stack, wanted) is job) == waits


@pytest.mark.parametrize("is_prepared", [False, True])
def test_only_one_process_at_a_time_logs_in_on_a_host(is_prepared: bool) -> None:
    """Each of these logs in on all hosts. The next one comes when the one before has had its answers."""
    seen: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: seen.append(what)

    ended = SimpleNamespace(to_end=lambda _: "ended")
    new: Any = SimpleNamespace(
        job=SimpleNamespace(placement=BOTH, context=SimpleNamespace(job="try", servers=0)),
        connect=note("agents log in"),
        ask=note("agents have answered"),
        attempt=SimpleNamespace(beat_for=note("beats"), hosts_now=dict),
        ready=lambda: seen.append("mpiexec logs in") or ended,
    )
    keepers: Any = SimpleNamespace(begin=note("keepers log in"), settle=note("keepers have answered"))
    reserve: Any = SimpleNamespace(begin=note("interpreters are of the attempt before"))
    with Attempts(nothing, lambda *_: new, keepers, reserve, Live("", [], 0.0)) as made:
        if is_prepared:
            made._take = lambda *_: new  # type: ignore[method-assign]
        assert made.run(new.job, lambda: None) == "ended"
    assert seen == [
        *([] if is_prepared else ["agents log in", "agents have answered"]),
        "keepers log in",
        *(["beats"] if is_prepared else []),
        "keepers have answered",
        "interpreters are of the attempt before",
        "mpiexec logs in",
    ]


def test_agents_and_mpiexec_do_not_log_in_together() -> None:
    """A host that all logins pass refuses some of many at once. mpiexec comes when the agents have their answers."""
    job: Any = Asking()
    keepers: Any = SimpleNamespace()
    with Attempts(nothing, job.make, keepers, None, Live("", [], 0.0)) as made:
        for _ in range(3):
            made._look(job)
        assert job.logins == [("agents", False, True)]
        job.answer.set()
        until(lambda: made._look(job) or len(job.logins) == 2)
        for _ in range(3):
            made._look(job)
        assert job.logins == [("agents", False, True), ("mpiexec", True, True)]


def test_a_try_that_has_taken_over_is_seen_until_its_end() -> None:
    """Its agents are about to go, and cannot say any more what its ranks do."""
    live = Live("", [], 0.0)
    new: Any = SimpleNamespace(
        job=SimpleNamespace(placement=BOTH, context=SimpleNamespace(job="try", servers=0)),
        attempt=SimpleNamespace(hosts_now=dict, records=dict),
    )
    with Attempts(nothing, nothing, None, None, live) as made:
        with ExitStack() as stack:
            made.after(stack, new, lambda: None)()
            assert live.answer()["state"] == "starts"
        new.attempt.hosts_now = None
        assert (live.answer()["state"], live.answer()["ids"]) == ("restarts", ["try"])


def succeeded(keepers: Keepers, end: Ended | LaunchError) -> Successor:
    """A successor that knows that its job has ended in this way: at once, or it could not even be started."""

    def ask() -> None:
        if isinstance(end, LaunchError):
            raise end

    job: Any = SimpleNamespace(
        job=SimpleNamespace(placement=Placement((Place("a", 0, 2),), own="a")),
        attempt=SimpleNamespace(records=dict),
        connect=lambda keepers, is_idle: None,
        ask=ask,
        ready=lambda: job,
        start=lambda: None,
        beside=lambda: False,
        to_end=lambda: end,
    )
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
        (Ended(1, failed=RankRecord(1, phase=FAILED, error="no memory is left")), ("a",)),
        (Ended(1, trouble=("nobody knows",)), ()),
        (Ended(0), ()),
        (refused(("b",), {"c": "train.py differs"}), ("b", "c")),
        (refused((), {}), ()),
    ],
)
def test_because_of_which_hosts_a_successor_cannot_take_over(
    keepers: Keepers, end: Ended | LaunchError, faulty: tuple[str, ...]
) -> None:
    assert succeeded(keepers, end).faulty == faulty


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_successor_is_for_the_whole_job(keepers: Keepers, number: signal.Signals) -> None:
    """The signal comes just while the successor handles the end of the next attempt."""
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in numbers}
    try:
        succeeded(keepers, Ended(128 + number, is_interrupted=True))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert heard == [number]
