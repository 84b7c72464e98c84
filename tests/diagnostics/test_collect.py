"""How long a node is waited for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.diagnostics.agent import UnansweredError
from mpitrain.diagnostics.collect import _wait_while_it_talks
from mpitrain.diagnostics.node import children


def test_a_slow_node_is_waited_for_as_long_as_it_answers() -> None:
    agent: Any = SimpleNamespace(heard=0.0)
    answer: Future[str] = Future()

    def talk() -> None:
        for _ in range(4):
            time.sleep(0.15)
            agent.heard = time.monotonic()
        answer.set_result("late")

    threading.Thread(target=talk, daemon=True).start()
    assert _wait_while_it_talks(agent, answer, time.monotonic(), 0.4) == "late"


def test_a_silent_node_is_not() -> None:
    agent: Any = SimpleNamespace(heard=0.0)
    started = time.monotonic()
    with pytest.raises(UnansweredError, match="no answer in time"):
        _wait_while_it_talks(agent, Future(), started, 0.2)
    assert time.monotonic() - started < 2


def test_an_answer_that_failed_is_not_waited_for_again() -> None:
    agent: Any = SimpleNamespace(heard=time.monotonic() + 9)
    answer: Future[str] = Future()
    answer.set_exception(UnansweredError("the connection was lost"))
    with pytest.raises(UnansweredError, match="the connection was lost"):
        _wait_while_it_talks(agent, answer, time.monotonic(), 9.0)


def test_commands_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would have its deadline to share with all others, on a machine that is slow to start programs."""
    monkeypatch.setattr(children, "_slots", threading.Semaphore(2))
    running: list[int] = []
    most: list[int] = []

    def run(*_: object) -> tuple[int, str, str]:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return 0, "", ""

    monkeypatch.setattr(children, "_run", run)
    threads = [threading.Thread(target=children.run, args=(["true"],)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 2
