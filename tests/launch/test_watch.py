"""An attempt as its launcher sees it: agents that are killed, say nothing, or are not needed any more."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attempting
import pytest
from attempting import is_alive, rank_of, wait_for_trouble, wait_until_gone
from programs import program

from jobs import until
from mpitrain.errors import LaunchError
from mpitrain.launch import agents as agents_module
from mpitrain.launch.agents import Agents
from mpitrain.launch.connections import Connection
from mpitrain.launch.placement import Place
from mpitrain.launch.shared_files import FOLDER
from mpitrain.launch.watch import AttemptOnHosts
from mpitrain.launch.watched import WatchedJob

# Fixtures: pytest finds them by these names.
wish, asking, job = attempting.wish, attempting.asking, attempting.job


@contextmanager
def attempt_here(wish: dict[str, Any], *keepers: Any, live: str = "") -> Iterator[AttemptOnHosts]:
    with Agents("here", live) as agents, AttemptOnHosts(agents, ["here"], {"here": wish}, *keepers) as attempt:
        attempt.facts()
        yield attempt


def test_in_place_of_a_killed_agent_another_one_ends_the_job(wish: dict[str, Any], job: list[int]) -> None:
    """The new agent ends the job's processes and its roll call, and removes MPI's files since the first agent began."""
    with attempt_here(wish) as attempt:
        attempt.start()
        until(lambda: attempt.reports["here"].since)
        file = Path(FOLDER) / f"mpich_shm_{uuid.uuid4().hex[:8]}_test"
        file.write_bytes(bytes(4096))
        try:
            os.kill(attempt._connections["here"].process.pid, signal.SIGKILL)
            killed = "here: the agent of the job there was killed by signal 9"
            assert wait_for_trouble(attempt) == f"{killed}\nThe job is ended on all hosts"
            assert all(map(is_alive, job))
            attempt.end(0.0)
            assert {pid for pid, _ in attempt.reports["here"].left or []} == {*job}
            assert attempt.reports["here"].immortal == []
            assert not file.exists()
        finally:
            file.unlink(missing_ok=True)
    wait_until_gone(job)
    assert not Path(wish["roll_call"]).exists()


def test_nobody_waits_for_facts_of_an_attempt_that_has_been_left(asking: dict[str, Any], tmp_path: Path) -> None:
    """The agents stay for the next attempt, so their connections stay open: it once waited for 90 s."""
    began, found = tmp_path / "began", []
    asking["python"] = str(program(tmp_path / "slow", f"touch {began}; exec sleep 60"))

    def ask(attempt: AttemptOnHosts) -> None:
        with pytest.raises(LaunchError, match="the attempt has been left"):
            attempt.facts()
        found.append(time.monotonic())

    with Agents("here", "") as agents:
        with AttemptOnHosts(agents, ["here"], {"here": asking}) as attempt:
            thread = threading.Thread(target=ask, args=(attempt,))
            thread.start()
            until(began.exists)
        left = time.monotonic()
        thread.join()
        assert found[0] - left < 5.0


def test_a_living_launcher_removes_its_socket_itself(wish: dict[str, Any], tmp_path: Path) -> None:
    """An agent that has heard a goodbye does not look whether somebody listens there."""
    path = tmp_path / "of_launcher.live"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        with attempt_here(wish, live=str(path)):
            pass
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert path.exists()


def test_an_end_is_one_even_if_it_may_not_be_the_first(wish: dict[str, Any]) -> None:
    """The ranks that mpiexec then tells to end by SIGTERM must hear that the job fails."""
    told: list[bool] = []
    keepers: Any = SimpleNamespace(beat=lambda _records, *, is_ending, has_failed: told.append(is_ending or has_failed))
    with attempt_here(wish, keepers) as attempt:
        before = attempt.reports["here"].ranks
        attempt.start()
        with rank_of(wish, 0, "init", "old kernel") as first, rank_of(wish, 1, "init", "old kernel"):
            until(lambda: len(attempt.reports["here"].ranks) == 2)
            assert before == {}, "reports do not change while the main thread reads them"
            assert not any(told)
            first.kill()
            until(lambda: told[-1])
        assert attempt.first_ends() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_trouble(wish: dict[str, Any]) -> None:
    """Otherwise the launcher would continue without the watch, and the agents would end the job without a reason."""
    with attempt_here(wish) as attempt:
        attempt.start()
        attempt.phases.when.clear()  # so that the next report fails
        with rank_of(wish, 0):
            said = "the job is ended on all hosts, because it cannot be watched: KeyError('started')"
            assert wait_for_trouble(attempt) == said


_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # of ptrace(2)


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Hold the main thread of a process; its other threads continue."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    for request in (_SEIZE, _INTERRUPT):
        if ptrace(request, pid, None, None):
            pytest.skip(f"a process may not be traced here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, 0)
    try:
        yield
    finally:
        ptrace(_DETACH, pid, None, None)


@contextmanager
def held_where_the_rest_goes_on(agent: Connection) -> Iterator[None]:
    """Hold the main thread of an agent where it waits for the kernel, as a disk that hangs does.

    Anywhere else the thread may hold the interpreter's lock, and then the thread with the sign of life stands too.
    """
    for _ in range(20):
        with held(agent.process.pid):
            time.sleep(0.5)  # what was on its way at the hold is heard by then
            heard_seconds = agent.heard_seconds
            time.sleep(2.5)
            if agent.heard_seconds > heard_seconds:
                yield
                return
        time.sleep(random.uniform(0.1, 0.4))
    pytest.fail("the thread with the sign of life stood at each of 20 holds")


def test_an_agent_that_lives_and_does_not_answer(wish: dict[str, Any]) -> None:
    """Its thread still gives a sign of life every second. Nobody confirms then that the job has ended there."""
    with attempt_here(wish) as attempt:
        attempt.start()
        with held_where_the_rest_goes_on(attempt._connections["here"]):
            said = wait_for_trouble(attempt)
            assert said.startswith("here: the agent of the job there lives, but has not answered for 1"), said
            assert attempt.reports["here"].has_vanished
            watched = WatchedJob([Place("here", 0, 1)], attempt, Path(wish["roll_call"]), 0.0)
            remedy = "`ssh here ps -fu $USER`"
            unsure = [f"here has not confirmed that nothing of the job is left; {remedy}"]
            assert watched.end(0.0) == ([], unsure)


def test_an_agent_that_ends_while_it_asks(
    asking: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed if it does not end in time. Its roll call does not stay."""
    monkeypatch.setattr(agents_module, "_CLOSE_SECONDS", 0.0)
    slow, roll_call = program(tmp_path / "slow", "exec sleep 20"), Path(asking["roll_call"])
    wishes = {"here": {**asking, "python": str(slow)}}
    with Agents("here") as agents, AttemptOnHosts(agents, ["here"], wishes):
        until(roll_call.exists)
    assert not roll_call.exists()


@pytest.fixture
def both(wish: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptOnHosts]:
    """An attempt on two hosts, which are both this machine."""
    connect = agents_module.connect
    monkeypatch.setattr(agents_module, "connect", lambda host, _, *rest, **more: connect(host, True, *rest, **more))
    wishes = {"here": wish, "there": {**wish, "roll_call": str(tmp_path / "other")}}
    with Agents("here") as agents, AttemptOnHosts(agents, wishes, wishes) as attempt:
        attempt.facts()
        attempt.keep()
        yield attempt


@pytest.mark.parametrize(("lost", "fits"), [("there", True), ("here", False)])
def test_a_next_try_without_a_host(both: AttemptOnHosts, lost: str, fits: bool) -> None:
    """An agent that was lost does not matter if its host takes no part."""
    os.kill(both._connections[lost].process.pid, signal.SIGKILL)
    wait_for_trouble(both)
    assert both.narrow(["here"]) is fits
    assert list(both.reports) == ["here"]
    if fits:
        assert both.trouble is None
        with rank_of(both._wishes["here"], 0):
            until(lambda: both.reports["here"].ranks)  # it is still heard


def test_an_agent_serves_several_attempts_one_after_the_other_and_at_once(wish: dict[str, Any], tmp_path: Path) -> None:
    """One process, to which only the first one connects. It goes when nobody needs it any more."""
    other = {**wish, "token": uuid.uuid4().hex, "roll_call": str(tmp_path / "other")}
    with Agents("here") as agents:
        agents.hold(["here"])
        with AttemptOnHosts(agents, ["here"], {"here": wish}) as first:
            first.facts()
            process = first._connections["here"].process
            with AttemptOnHosts(agents, ["here"], {"here": other}) as second, rank_of(other, 1), rank_of(wish, 0):
                second.facts()
                until(lambda: list(first.reports["here"].ranks) == [0] and list(second.reports["here"].ranks) == [1])
                first.end(0.0)
                assert first.reports["here"].left == []
                assert second._connections["here"].process is process
        until(lambda: not Path(other["roll_call"]).exists())
        assert process.poll() is None
        agents.release()
        assert process.poll() is None
        agents.hold([])
        until(lambda: process.poll() == 0)


def test_a_next_attempt_has_a_new_agent_in_place_of_a_killed_one(wish: dict[str, Any], tmp_path: Path) -> None:
    """The attempt that it served says so all the same."""
    other = {**wish, "token": uuid.uuid4().hex, "roll_call": str(tmp_path / "other")}
    with attempt_here(wish) as attempt:
        attempt.start()
        process = attempt._connections["here"].process
        process.kill()
        until(lambda: attempt._connections["here"].is_closed)
        with AttemptOnHosts(attempt._agents, ["here"], {"here": other}) as following:
            following.facts()
            assert following._connections["here"].process is not process
            assert wait_for_trouble(attempt).startswith("here: the agent of the job there was killed by signal 9\n")
            assert following.trouble is None


@pytest.fixture
def following(both: AttemptOnHosts, tmp_path: Path) -> Iterator[AttemptOnHosts]:
    """A prepared attempt on the other host."""
    wish = {"token": uuid.uuid4().hex, "roll_call": str(tmp_path / "of_next"), "peers": {}, "idle": True}
    with AttemptOnHosts(both._agents, ["there"], {"there": wish}) as following:
        following.facts()
        yield following
    until(lambda: not (tmp_path / "of_next").exists())


def test_nothing_stays_of_a_prepared_attempt_whose_agent_was_killed(
    both: AttemptOnHosts, following: AttemptOnHosts
) -> None:
    """The present attempt has a new agent, which ends what is left of it. Of the other one it removes the roll call."""
    both.start()
    assert Path(following._wishes["there"]["roll_call"]).exists()
    both._connections["there"].process.kill()
    wait_for_trouble(both)
    both.end(0.0)
    assert both.reports["there"].left == []


def test_what_an_agent_leaves_that_is_killed_at_once(following: AttemptOnHosts) -> None:
    """It has not told yet when the job began there."""
    connection = following._connections["there"]
    connection.process.kill()
    until(lambda: connection.is_closed)
    assert following.reports["there"].since == 0.0
    following.end(0.0)
    assert following.reports["there"].left == []


def test_paths_that_a_next_try_needs(both: AttemptOnHosts, tmp_path: Path) -> None:
    """One that is gone by now; and a host that does not answer in time."""
    here, gone = tmp_path / "script.py", tmp_path / "gone"
    here.touch()
    assert both.have_paths([str(here), str(tmp_path)])
    assert not both.have_paths([str(here), str(gone)])
    with held(both._connections["there"].process.pid):
        assert not both.have_paths([str(here)])
