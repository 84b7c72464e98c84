"""A service that does not answer: who waits for it, for how long, and what becomes of the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from jobs import HANG_SECONDS
from mpitrain.training.writers import service
from mpitrain.training.writers.service import ServiceCalls


def test_what_a_call_raises_is_raised() -> None:
    calls = ServiceCalls("service")
    made: list[int] = []

    def refuse() -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        calls.get(refuse)
    calls.get(lambda: made.append(threading.get_ident()))
    assert made
    assert made != [threading.get_ident()]


def test_an_outage_is_waited_for_once_and_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that hangs goes on by itself; the others are not made before it has ended."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    calls, made, answered = ServiceCalls("service"), [], threading.Event()

    def seconds_of(call: Callable[[], object]) -> float:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^service has not answered for \d+ s$"):
            calls.get(lambda: made.append(call()))
        return time.monotonic() - begun

    def hang() -> int:
        answered.wait()
        return 1

    assert seconds_of(hang) >= 0.2
    assert calls._patience == 0.0  # so that these do not wait
    for _ in range(100):
        seconds_of(lambda: 2)
    calls.renew_patience()
    assert seconds_of(lambda: 3) >= 0.2
    assert made == []
    answered.set()
    assert calls._thread is not None
    calls._thread.join()
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls.renew_patience()
    calls.get(lambda: made.append(4))
    assert made == [1, 4]
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    answered.clear()
    assert seconds_of(hang) >= 0.2  # it has answered, so this is another outage
    answered.set()


def test_calls_that_fail_late_share_one_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a gateway that answers with an error after some seconds. A success gives the patience back."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls, left = ServiceCalls("service"), [HANG_SECONDS]

    def fail() -> None:
        time.sleep(0.05)
        raise ConnectionError("no answer")

    for _ in range(3):
        with pytest.raises(ConnectionError, match="no answer"):
            calls.get(fail)
        assert calls._patience < left[-1]
        left.append(calls._patience)
    calls.get(lambda: None)
    assert calls._patience == HANG_SECONDS


def test_an_old_call_that_fails_while_the_next_one_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has what this wait has left."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls, answered, left = ServiceCalls("service"), threading.Event(), list[float]()

    def fail() -> None:
        answered.wait()
        raise ConnectionError("no answer")

    calls._patience = 0.0
    with pytest.raises(TimeoutError):
        calls.get(fail)
    calls.renew_patience()
    threading.Timer(0.05, answered.set).start()
    calls.get(lambda: left.append(calls._patience))
    assert left[0] < HANG_SECONDS


def test_an_error_that_comes_late_is_not_that_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.05)
    calls, answered = ServiceCalls("service"), threading.Event()

    def fail_late() -> None:
        answered.wait()
        raise ValueError("late")

    with pytest.raises(TimeoutError):
        calls.get(fail_late)
    answered.set()
    assert calls._thread is not None
    calls._thread.join()
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls.renew_patience()
    calls.get(lambda: None)
