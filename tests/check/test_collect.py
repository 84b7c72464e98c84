"""How long the check waits for a node."""

from __future__ import annotations

import fcntl
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from check.made_up import target
from mpitrain.check import collect
from mpitrain.check.agent import UnansweredError
from mpitrain.check.check import Ask
from mpitrain.check.collect import _wait_while_it_talks
from mpitrain.check.node import children


def test_a_slow_node_is_waited_for_as_long_as_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each wait, the node has sent something meanwhile."""
    agent: Any = SimpleNamespace(heard=0.0)
    said = [10.0, 20.0, 30.0]

    def wait_for(answer: Future[str], seconds: float) -> str:
        if not said:
            return "late"
        agent.heard = said.pop(0)
        raise UnansweredError("no answer in time")

    monkeypatch.setattr(collect, "wait_for", wait_for)
    assert _wait_while_it_talks(agent, Future(), 5.0, 0.4) == "late"


def test_a_silent_node_is_not() -> None:
    agent: Any = SimpleNamespace(heard=0.0)
    with pytest.raises(UnansweredError, match="no answer in time"):
        _wait_while_it_talks(agent, Future(), time.monotonic(), 0.2)


def test_an_answer_that_failed_is_not_waited_for_again() -> None:
    agent: Any = SimpleNamespace(heard=time.monotonic() + 9)
    answer: Future[str] = Future()
    answer.set_exception(UnansweredError("the connection was lost"))
    with pytest.raises(UnansweredError, match="the connection was lost"):
        _wait_while_it_talks(agent, answer, time.monotonic(), 9.0)


class Busy:
    """An agent that answers questions about the clock at once, and others when the machine has time."""

    def __init__(self, is_alive: bool) -> None:
        self.heard = time.monotonic()
        self.late: Future[Any] = Future()
        self._is_alive = is_alive

    def begin(self, *_: object) -> Future[Any]:
        return self.late

    def ask(self, *_: object, **__: object) -> float:
        if not self._is_alive:
            raise UnansweredError("no answer in time")
        self.late.set_result("late")  # after the deadline of a machine that is not busy, before that of a busy one
        return 0.0

    def give_up(self, why: str) -> None:
        self.late.set_exception(UnansweredError(why))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_busy_node_has_the_time_that_its_commands_have(is_alive: bool) -> None:
    """A silent node does not have that time."""
    expected = "late" if is_alive else {"error": "it no longer answers"}
    with collect.Cluster(target(1), lambda _: cast(Any, Busy(is_alive))) as cluster:
        cluster.agents["node1"] = cast(Any, Busy(is_alive))
        if is_alive:
            assert cluster.ask("node1", "way", {}, seconds=0.05) == "late"
        else:
            with pytest.raises(UnansweredError, match="it no longer answers"):
                cluster.ask("node1", "way", {}, seconds=0.05)
        cluster.agents["node1"] = cast(Any, Busy(is_alive))
        cluster.seen.nodes["node1"] = {}
        cluster.look_at_nodes([Ask("slow", "slow", "job", seconds=0.05 - collect._SLACK_SECONDS)], lambda _: None)
        assert cluster.seen.nodes["node1"]["slow"] == expected


def test_commands_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, on a machine that is slow to start programs, all commands would share one deadline."""
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


def test_a_program_on_a_dead_share_holds_up_its_own_question_only(tmp_path: Path) -> None:
    """To open the program never ends. Here a lease has that effect; the kernel breaks it after 45 s."""
    program = tmp_path / "program"
    shutil.copy("/bin/true", program)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the signal tells the holder that somebody opens the file
    try:
        with program.open("rb") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            with pytest.raises(children.SlowError):
                children.run([str(program)], 0.5)
    finally:
        signal.signal(signal.SIGIO, before)
    assert children.run([str(program)])[0] == 0


def test_a_program_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch(0o600)
    assert children.run(["no-such-program"]) == (127, "", "no-such-program: No such file or directory")
    assert children.run([str(plain)]) == (127, "", f"{plain}: Permission denied")
    assert children.run(["sh", "-c", "echo it is full >&2; exit 127"]) == (127, "", "it is full\n")
    for line in ("no-such-interpreter", "no-such-interpreter -u"):  # the script exists, its interpreter does not
        plain.write_text(f"#!/usr/bin/env {line}\n")
        plain.chmod(0o755)
        assert children.run([str(plain)]) == (127, "", f"{line}: No such file or directory")
