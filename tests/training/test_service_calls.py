"""A service that does not answer: who waits for it, for how long, and what becomes of the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from jobs import HANG_SECONDS
from mpitrain.training.writers import service_calls
from mpitrain.training.writers.service_calls import ServiceCalls


def test_what_a_call_raises_is_raised() -> None:
    service = ServiceCalls("service")
    made: list[int] = []

    def refuse() -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        service.get(refuse)
    service.get(lambda: made.append(threading.get_ident()))
    assert made
    assert made != [threading.get_ident()]


def test_an_outage_is_waited_for_once_and_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that hangs goes on by itself; the others are not made before it has ended."""
    monkeypatch.setattr(service_calls, "PATIENCE_SECONDS", 0.2)
    service, made, answered = ServiceCalls("service"), [], threading.Event()

    def seconds_of(call: Callable[[], object]) -> float:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^service has not answered for \d+ s$"):
            service.get(lambda: made.append(call()))
        return time.monotonic() - begun

    def hang() -> int:
        answered.wait()
        return 1

    assert seconds_of(hang) >= 0.2
    assert service._patience == 0.0  # so that these do not wait
    for _ in range(100):
        seconds_of(lambda: 2)
    service.renew_patience()
    assert seconds_of(lambda: 3) >= 0.2
    assert made == []
    answered.set()
    assert service._thread is not None
    service._thread.join()
    monkeypatch.setattr(service_calls, "PATIENCE_SECONDS", HANG_SECONDS)
    service.renew_patience()
    service.get(lambda: made.append(4))
    assert made == [1, 4]
    monkeypatch.setattr(service_calls, "PATIENCE_SECONDS", 0.2)
    answered.clear()
    assert seconds_of(hang) >= 0.2  # it has answered, so this is another outage
    answered.set()


def test_an_error_that_comes_late_is_not_that_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_calls, "PATIENCE_SECONDS", 0.05)
    service, answered = ServiceCalls("service"), threading.Event()

    def fail_late() -> None:
        answered.wait()
        raise ValueError("late")

    with pytest.raises(TimeoutError):
        service.get(fail_late)
    answered.set()
    assert service._thread is not None
    service._thread.join()
    monkeypatch.setattr(service_calls, "PATIENCE_SECONDS", HANG_SECONDS)
    service.renew_patience()
    service.get(lambda: None)
