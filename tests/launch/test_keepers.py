"""A keeper holds descriptors for later ranks, tells ranks what the launcher wants, and answers nobody else."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from holding import content, is_gone, memory

from jobs import HANG_SECONDS, until
from keeping import keeper
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import DIES, LEAVES, STAYS, KeeperLine
from mpitrain.watching.rank_record import RankRecord


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    """Keepers of a job on this machine alone."""
    with Keepers("here", f"mpitrain-test-{secrets.token_hex(8)}") as keepers:
        keepers.begin(["here"], "try")
        keepers.settle()
        yield keepers


def test_what_is_kept_outlives_who_kept_it(keepers: Keepers) -> None:
    line = KeeperLine(keepers.name, "try")
    given = [memory(b"first"), memory(b"second")]
    line.keep("1/state", given)
    for descriptor in given:
        os.close(descriptor)
    line.close()
    line = KeeperLine(keepers.name, "try")
    assert line.names() == ["1/state"]
    back = line.give("1/state")
    assert [content(descriptor) for descriptor in back] == [b"first", b"second"]
    assert line.give("1/nothing") == []
    line.close()


def test_a_new_try_has_the_same_keeper(keepers: Keepers) -> None:
    line = KeeperLine(keepers.name, "try")
    line.keep("1/state", [memory(b"x")])
    keepers.begin(["here"], "try")
    keepers.settle()
    assert line.names() == ["1/state"]
    line.close()


def test_it_waits_for_another_launcher(keepers: Keepers) -> None:
    """The launcher ends the job, and says nothing of a loss."""
    line = KeeperLine(keepers.name, "try")
    line.keep("1/state", [memory(b"x")])
    process = keepers._connections["here"].process
    assert keepers.stay("too few hosts") == ["here"]
    until(lambda: "until_ms" in line.estate()[0])
    assert json.loads(line.estate()[1]) == {"ended": "too few hosts"}
    assert line.names() == ["1/state"]
    line.drop()
    line.close()
    assert process.wait(HANG_SECONDS) == 0


def test_a_host_that_comes_back_keeps_what_it_holds() -> None:
    """It was cut off once, so it has perhaps not heard the goodbye. The keeper that it has now is another one."""
    name = f"mpitrain-test-{secrets.token_hex(8)}"
    with Keepers("here", name) as keepers:
        keepers.begin(["here"], "first")
        keepers.settle()
        cut_off = keepers._connections["here"].process
        os.kill(cut_off.pid, signal.SIGSTOP)
        keepers.begin([], "without it")
        cut_off.kill()
        cut_off.wait()
        keepers.begin(["here"], "with it")
        keepers.settle()
        line = KeeperLine(name, "with it")
        line.keep("1/state", [memory(b"x")])
        process = keepers._connections["here"].process
        assert keepers.stay("too few hosts") == ["here"]
    assert line.names() == ["1/state"]
    line.drop()
    line.close()
    assert process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize("descriptors", [None, []])
def test_one_that_holds_nothing_does_not_wait(keepers: Keepers, descriptors: list[int] | None) -> None:
    """A rank that finds no room keeps no descriptors under a name."""
    if descriptors is not None:
        line = KeeperLine(keepers.name, "try")
        line.keep("1/state", descriptors)
        line.close()
    assert keepers.stay("too few hosts") == []
    until(lambda: is_gone(keepers.name))


def test_a_killed_keeper_is_replaced(keepers: Keepers) -> None:
    line = KeeperLine(keepers.name, "try")
    line.keep("1/state", [memory(b"x")])
    keepers._connections["here"].process.kill()
    with pytest.raises(OSError):
        until(lambda: line.names() is None)
    line.close()
    keepers.begin(["here"], "try")
    keepers.settle()
    line = KeeperLine(keepers.name, "try")
    assert line.names() == []
    line.close()


def test_an_answer_to_an_earlier_question_does_not_count(keepers: Keepers) -> None:
    """The try before was refused, so nobody has waited for its keepers to settle."""
    keepers.begin(["here"], "refused")
    process = keepers._connections["here"].process
    os.kill(process.pid, signal.SIGSTOP)
    keepers.begin(["here"], "next")
    assert keepers._connections["here"].process is not process
    process.kill()


def test_a_host_that_takes_no_part_loses_its_keeper(keepers: Keepers) -> None:
    keepers.begin([], "try")
    until(lambda: is_gone(keepers.name))


def test_older_runs_and_other_ranks_are_dropped(keepers: Keepers) -> None:
    line = KeeperLine(keepers.name, "try")
    for name in ("1/state", "2/state", "2/rank-0", "2/rank-3", "3/state"):
        line.keep(name, [memory(b"x")])
    line.keep_only(["2/state", "2/rank-0"], 2)
    assert line.names() == ["2/rank-0", "2/state", "3/state"]
    line.close()


def test_a_name_that_is_taken(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A message says that the name is taken, and the job goes on without a keeper."""
    name = f"mpitrain-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind("\0" + name)
        with Keepers("here", name) as keepers:
            keepers.begin(["here"], "try")
            keepers.settle()
            said = capfd.readouterr().err
            assert "mpitrain: here: no keeper can be started (" in said
            assert "Address already in use" in said


def test_nonsense_ends_only_its_own_line() -> None:
    with keeper() as name:
        for nonsense in (b"no json", b"[]", b"{}", b'{"give": {}}'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.connect("\0" + name)
                line.settimeout(60)
                line.send(nonsense)
                assert line.recv(100) == b""
        line_after = KeeperLine(name, "try")
        assert line_after.names() == []
        line_after.close()


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
def test_what_ranks_hear(keepers: Keepers, wish: int, is_ending: bool, has_failed: bool, heard: int) -> None:
    """A rank that SIGTERM has told to end goes on until it hears DIES, or its host has left."""
    line = KeeperLine(keepers.name, "try")
    keepers.wish = -wish - 2  # a wish of none of the ranks
    keepers.beat([], is_ending=False)
    until(lambda: line.wish() == keepers.wish)
    keepers.wish = wish
    keepers.beat([RankRecord(0, run=1, told_to_end=True)], is_ending=is_ending, has_failed=has_failed)
    until(lambda: line.wish() == heard)
    assert (keepers.run, list(keepers.told)) == (1, [0])
    line.close()


def test_a_wish_is_for_one_try(keepers: Keepers) -> None:
    """The ranks of the next try are there before those of this one have left."""
    line, line_of_next = KeeperLine(keepers.name, "try"), KeeperLine(keepers.name, "next")
    keepers.wish = LEAVES
    keepers.beat([], is_ending=False)
    until(lambda: line.wish() == LEAVES)
    assert line_of_next.wish() == STAYS
    keepers.take_over(["here"], "next")
    until(lambda: line.wish() == STAYS)
    keepers.wish = LEAVES
    keepers.beat([], is_ending=False)
    until(lambda: line_of_next.wish() == LEAVES)
    line.close()
    line_of_next.close()


def test_ranks_wait_for_those_before(keepers: Keepers) -> None:
    line, waiting, other = (KeeperLine(keepers.name, name) for name in ("try", "next", "next"))
    line.enter()
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(waiting.follow("try")))
    thread.start()
    assert other.follow("a try with no ranks on this host") == []
    time.sleep(0.3)
    assert not answers
    line.leave(7, 123)
    thread.join(60)
    assert answers == [[7, 123]]
    assert other.follow("try") == [7, 123]
    for each in (line, waiting, other):
        each.close()


def test_nobody_follows_a_try_that_has_failed(keepers: Keepers) -> None:
    """The ranks of that try have ended without leaving, so its state is not the last one."""
    line, waiting = KeeperLine(keepers.name, "try"), KeeperLine(keepers.name, "next")
    line.enter()
    line.close()
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
    waiting.close()


def test_room_for_another_try(keepers: Keepers) -> None:
    """The keeper counts the memory of the ranks that have entered, and sees their GPUs."""
    line, line_of_next = KeeperLine(keepers.name, "try"), KeeperLine(keepers.name, "next")
    assert keepers.rooms()["here"].num_ranks == 0
    line.enter()
    line_of_next.enter()
    before = keepers.rooms()["here"]
    block = bytearray(64 << 20)
    after = keepers.rooms()["here"]
    assert before.num_ranks == after.num_ranks == 1
    assert after.held_bytes - before.held_bytes == pytest.approx(len(block), rel=0.1)
    assert 0 < after.free_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert not after.has_gpu
    line.close()
    line_of_next.close()


AS_NOBODY = """
import os, select, socket, sys
sys.path[:] = {path}
from mpitrain.launch.kept import KeeperLine, Kept
from mpitrain.watching.sockets import receive, send
os.setuid(65534)
{does}
"""
ASKS = """
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(chr(0) + sys.argv[1])
try:
    send(line, {"give": "1/state"})
    print(receive(line))
except OSError as error:
    print(type(error).__name__)
"""
SERVES = """
kept = Kept(sys.argv[1])
print("there", flush=True)
while sys.stdin not in select.select([sys.stdin, kept], [], [])[0]:
    kept.look()
"""


@contextlib.contextmanager
def nobody(does: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    command = [sys.executable, "-c", AS_NOBODY.format(path=sys.path, does=does), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_another_user_gets_nothing(keepers: Keepers) -> None:
    """Anybody may connect to such a socket."""
    line = KeeperLine(keepers.name, "try")
    line.keep("1/state", [memory(b"secret")])
    with nobody(ASKS, keepers.name) as process:
        assert process.communicate(timeout=HANG_SECONDS)[0] in ("ConnectionResetError\n", "BrokenPipeError\n")
    (back,) = line.give("1/state")
    assert content(back) == b"secret"
    os.close(back)
    line.close()


def test_the_keeper_of_another_user_is_refused() -> None:
    """It would get the state of the training."""
    name = f"mpitrain-test-{secrets.token_hex(8)}"
    with nobody(SERVES, name) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        with pytest.raises(PermissionError, match="the keeper belongs to user 65534"):
            KeeperLine(name, "try")
