"""Keepers as their launcher has them: what they hold for later ranks, and what ranks hear of the launcher's wishes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import holding
import pytest
from holding import Line, content, is_gone, memory, new_name

from jobs import HANG_SECONDS, until
from mpitrain.launch.agents import Agents
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import DIES, LEAVES, STAYS, KeeperLine
from mpitrain.watching.rank_record import RankRecord

line = holding.line  # a fixture: pytest finds it by this name


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    """Keepers of a job on this machine alone."""
    with Agents("here") as agents, Keepers(agents, new_name(), {"tries": []}) as keepers:
        begin(keepers, "try")
        yield keepers


def begin(keepers: Keepers, name: str) -> None:
    keepers.begin(["here"], name)
    keepers.settle()


def test_what_is_kept_outlives_who_kept_it(keepers: Keepers, line: Line) -> None:
    first = KeeperLine(keepers.name, "try")
    given = [memory(b"first"), memory(b"second")]
    first.keep("1/state", given)
    for descriptor in given:
        os.close(descriptor)
    first.close()
    begin(keepers, "try")  # a new attempt has the same keeper
    second = line(keepers.name, "try")
    assert second.names() == ["1/state"]
    assert [content(descriptor) for descriptor in second.give("1/state")] == [b"first", b"second"]
    assert second.give("1/nothing") == []
    for name in ("2/state", "2/rank-0", "2/rank-3", "3/state"):
        second.keep(name, [memory(b"x")])
    second.keep_only(["2/state", "2/rank-0"], 2)  # older runs and other ranks are dropped
    assert second.names() == ["2/rank-0", "2/state", "3/state"]
    keepers.begin([], "try")  # a host that takes no part loses its keeper
    until(lambda: is_gone(keepers.name))


def agent_of(keepers: Keepers) -> subprocess.Popen[bytes]:
    return keepers._agents._connections["here"].process


def keeper_of(keepers: Keepers) -> int:
    """The process of the keeper."""
    with contextlib.closing(KeeperLine(keepers.name)) as line:
        line.lead("")
        return line.pid


@pytest.mark.parametrize("is_new", [False, True])
def test_it_waits_for_another_launcher(keepers: Keepers, line: Line, is_new: bool) -> None:
    """The launcher ends the job, and says nothing of a loss.

    A host that was cut off once has perhaps not heard the goodbye. The keeper that it has now is another one.
    """
    if is_new:
        agent, keeper = agent_of(keepers), keeper_of(keepers)
        line(keepers.name, "try").keep("1/old", [memory(b"x")])
        os.kill(agent.pid, signal.SIGSTOP)
        keepers.begin([], "without it")
        agent.kill()
        agent.wait()
        begin(keepers, "try")
        assert keeper_of(keepers) != keeper
    kept = line(keepers.name, "try")
    kept.keep("1/state", [memory(b"x")])
    agent = agent_of(keepers)
    assert keepers.stay("too few hosts") == ["here"]
    until(lambda: "until_ms" in kept.estate()[0])
    assert json.loads(kept.estate()[1])["ended"] == "too few hosts"
    assert kept.names() == ["1/state"]
    keepers._agents.hold([])
    assert agent.wait(HANG_SECONDS) == 0
    assert kept.names() == ["1/state"]
    kept.drop()
    until(lambda: is_gone(keepers.name))


def test_what_is_kept_outlives_the_agent(keepers: Keepers, line: Line) -> None:
    """Another agent leads its keeper from then on. Ranks hear through it what the launcher wishes."""
    rank, keeper = line(keepers.name, "try"), keeper_of(keepers)
    rank.keep("1/state", [memory(b"x")])
    agent = agent_of(keepers)
    agent.kill()
    until(lambda: keepers._agents._connections["here"].is_closed)
    begin(keepers, "try")
    assert agent_of(keepers) is not agent
    assert keeper_of(keepers) == keeper
    assert rank.names() == ["1/state"]
    assert "lost_ms" not in rank.estate()[0]
    keepers.wish = LEAVES
    keepers.beat([], is_ending=False)
    until(lambda: rank.wish() == LEAVES)


@pytest.mark.parametrize("descriptors", [None, []])
def test_one_that_holds_nothing_does_not_wait(keepers: Keepers, descriptors: list[int] | None) -> None:
    """A rank that finds no room keeps no descriptors under a name."""
    if descriptors is not None:
        with contextlib.closing(KeeperLine(keepers.name, "try")) as line:
            line.keep("1/state", descriptors)
    assert keepers.stay("too few hosts") == []
    until(lambda: is_gone(keepers.name))


def test_a_killed_keeper_is_replaced(keepers: Keepers, line: Line) -> None:
    before = line(keepers.name, "try")
    before.keep("1/state", [memory(b"x")])
    os.kill(keeper_of(keepers), signal.SIGKILL)
    with pytest.raises(OSError):
        until(lambda: before.names() is None)
    begin(keepers, "try")
    assert line(keepers.name, "try").names() == []


def test_a_keeper_that_does_not_answer_is_replaced(keepers: Keepers) -> None:
    keeper = keeper_of(keepers)
    os.kill(keeper, signal.SIGSTOP)
    begin(keepers, "next")
    assert keeper_of(keepers) != keeper


def test_a_name_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    """A message says that the name is taken, and the job continues without a keeper."""
    name = new_name()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind("\0" + name)
        with Agents("here") as agents, Keepers(agents, name) as keepers:
            begin(keepers, "try")
            said = capfd.readouterr().err
            assert "mpitrain: here: no keeper can be started (" in said
            assert "Address already in use" in said


@pytest.mark.parametrize(
    ("wish", "is_ending", "has_failed", "heard"),
    [
        (STAYS, False, False, STAYS),
        (STAYS, True, False, DIES),  # a rank has ended: mpiexec ends the others
        (LEAVES, True, False, LEAVES),  # ranks end because they leave
        (LEAVES, True, True, DIES),
        (STAYS, False, True, DIES),
    ],
)
def test_what_ranks_hear(
    keepers: Keepers, line: Line, wish: int, is_ending: bool, has_failed: bool, heard: int
) -> None:
    """A rank that SIGTERM has told to end continues until it hears DIES, or its host has left."""
    rank = line(keepers.name, "try")
    keepers.wish = -wish - 2  # a wish of none of the ranks
    keepers.beat([], is_ending=False)
    until(lambda: rank.wish() == keepers.wish)
    keepers.wish = wish
    keepers.beat([RankRecord(0, run=1, told_to_end=True)], is_ending=is_ending, has_failed=has_failed)
    until(lambda: rank.wish() == heard)
    assert (keepers.run, list(keepers.told)) == (1, [0])


def test_a_wish_is_for_one_try(keepers: Keepers, line: Line) -> None:
    """The ranks of the next attempt are there before those of this one have left."""
    present, following = line(keepers.name, "try"), line(keepers.name, "next")
    keepers.wish = LEAVES
    keepers.beat([], is_ending=False)
    until(lambda: present.wish() == LEAVES)
    assert following.wish() == STAYS
    keepers.take_over(["here"], "next")
    until(lambda: present.wish() == STAYS)
    keepers.wish = LEAVES
    keepers.beat([], is_ending=False)
    until(lambda: following.wish() == LEAVES)


def test_ranks_wait_for_those_before(keepers: Keepers, line: Line) -> None:
    present, waiting, other = (line(keepers.name, name) for name in ("try", "next", "next"))
    present.enter()
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(waiting.follow("try")))
    thread.start()
    assert other.follow("an attempt with no ranks on this host") == []
    time.sleep(0.3)
    assert not answers
    present.leave(7, 123)
    thread.join(60)
    assert answers == [[7, 123]]
    assert other.follow("try") == [7, 123]


def test_nobody_follows_a_try_that_has_failed(keepers: Keepers, line: Line) -> None:
    """The ranks of that attempt have ended without leaving, so its state is not the last one."""
    failed, waiting = KeeperLine(keepers.name, "try"), line(keepers.name, "next")
    failed.enter()
    failed.close()
    ended = threading.Event()

    def follow() -> None:
        with contextlib.suppress(OSError):
            waiting.follow("try")
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert not ended.wait(0.5)
    keepers.begin([], "after")
    assert ended.wait(60)
    thread.join()


def test_room_for_another_try(keepers: Keepers, line: Line) -> None:
    """The keeper counts the memory of the ranks that have entered, and sees their GPUs."""
    ranks = line(keepers.name, "try"), line(keepers.name, "next")
    assert keepers.rooms()["here"].num_ranks == 0
    for rank in ranks:
        rank.enter()
    before = keepers.rooms()["here"]
    block = bytearray(64 << 20)
    after = keepers.rooms()["here"]
    assert before.num_ranks == after.num_ranks == 1
    assert after.held_bytes - before.held_bytes == pytest.approx(len(block), rel=0.1)
    assert 0 < after.free_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert not after.has_gpu
