"""What a rank publishes, read by another process; and its stacks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mpitrain.launch.activity import WAITS, WORKS, look_at, process_state, read_record

RANK = """
import sys, threading, time
from mpitrain.launch.activity import BUSY, WAITS, publish
mine = publish(3)
mine.set_limits(10.0, 600.0)
mine.count_call(380)
def load():
    while True:
        words = sys.stdin.readline().split()
        if words[0] == "wait":
            mine.begin(WAITS, "allreduce " + "x" * 500, 12.5)
        elif words[0] == "nest":
            outer = mine.begin(BUSY, "save", 1.0)
            inner = mine.begin(WAITS, "mean", 2.0)
            mine.end(outer)
        elif words[0] == "move":
            mine.count_moved()
        elif words[0] == "loop":
            print("ok", flush=True)
            while True: pass
        print("ok", flush=True)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print(mine.descriptor, flush=True)
load()
"""


class Rank:
    """A process that publishes what it does as rank 3."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", RANK], stdin=pipe, stdout=pipe, text=True)
        self.at = (self.process.pid, int(self._answer()))

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self._answer() == "ok\n"


@pytest.fixture
def rank() -> Iterator[Rank]:
    """One, until the end of the test."""
    rank = Rank()
    with rank.process:
        yield rank
        rank.process.kill()


def test_what_it_waits_in(rank: Rank) -> None:
    before = read_record(3, *rank.at)
    assert before is not None
    assert (before["what"], before["words"], before["calls"], before["moved"]) == (WORKS, "", 380, 0)
    assert (before["stall_seconds"], before["hang_seconds"]) == (10.0, 600.0)
    rank.do("wait")
    rank.do("move")
    after = read_record(3, *rank.at)
    assert after is not None
    assert (after["what"], after["since"], after["moved"]) == (WAITS, 12.5, 1)
    assert after["words"] == "allreduce " + "x" * 390  # the rest is cut off


def test_waits_that_end_in_another_order(rank: Rank) -> None:
    rank.do("nest")
    record = read_record(3, *rank.at)
    assert record is not None
    assert (record["what"], record["words"], record["since"]) == (WAITS, "mean", 2.0)


def test_another_process_is_not_taken_for_it(rank: Rank) -> None:
    pid, descriptor = rank.at
    assert read_record(4, pid, descriptor) is None
    assert read_record(3, os.getpid(), descriptor) is None
    rank.process.kill()
    rank.process.wait()
    assert read_record(3, pid, descriptor) is None
    assert process_state(pid) == "gone"


def test_a_row_with_the_stack_of_a_loop(rank: Rank) -> None:
    rank.do("loop")
    ((number, pid, state, what, calls, seconds, words, kernel, stack),) = look_at({3: rank.at}, {})
    assert (number, pid, state, what, calls, seconds, words, kernel) == (3, rank.at[0], "R", WORKS, 380, 0.0, "", "")
    blocks = stack.split("\n\n")
    assert len(blocks) == 2  # of two threads, the main one last
    assert re.search(r'File "<string>", line (19|20) in load', blocks[-1])
    assert rank.process.poll() is None
    again = look_at({3: rank.at}, {})[0][-1]
    assert again.count("most recent call first") == 2  # without what was written before


def test_a_stopped_rank_is_not_asked(rank: Rank) -> None:
    os.kill(rank.at[0], signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    while process_state(rank.at[0]) != "T":
        assert time.monotonic() < deadline
    row = look_at({3: rank.at}, {3: 7.0})[0]
    assert row[2] == "T"
    assert row[5] == 7.0
    assert row[-1] == ""


def test_a_process_without_a_handler_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert look_at({0: (other.pid, 0)}, {})[0][-1] == ""
        assert other.poll() is None
