"""The record that a rank publishes on its page, read by another process; and the stacks of a rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.watching import view
from mpitrain.watching.rank_record import (
    FAILED,
    MOST_ORDER_BYTES,
    MOST_STEERING_BYTES,
    STACK_SIGNAL,
    STARTED,
    WAITS,
    WORKS,
    Page,
    RankRecord,
    read_record,
    write_order,
)
from mpitrain.watching.view import RankView, look_at, process_state, read_stacks, waited

RANK = """
import os, sys, threading, time
from mpitrain.watching.activity import publish
from mpitrain.watching.rank_record import BUSY, DONE, WAITS
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
        elif words[0] == "step":
            mine.begin_step(int(words[1]))
            mine.report({"loss": 1 / int(words[1]), "samples/s": 100.5})
            mine.publish("epoch", int(words[1]) // 100 + 1)
        elif words[0] == "record":
            mine.keep_record(words[1] * int(words[2]))
        elif words[0] == "many":
            mine.report({f"metric {number} " + "x" * 60: float(number) for number in range(20)})
        elif words[0] == "fork":
            child = os.fork()
            if child == 0:
                mine.enter(DONE)
                os._exit(0)
            os.waitpid(child, 0)
        elif words[0] == "fail":
            mine.fail("ValueError: bang", 123.25)
            mine.enter(DONE)
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
        return self.process.stdout.readline()

    def do(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self._answer() == "ok\n"


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank that lives until the end of the test."""
    rank = Rank()
    with rank.process:
        yield rank
        rank.process.kill()


def record_of(rank: Rank) -> RankRecord:
    """The record of rank 3."""
    pid, descriptor = rank.at
    record = read_record(f"/proc/{pid}/fd/{descriptor}", 3)
    assert record is not None
    return record


def view_of(rank: Rank, seconds: float = 0.0) -> RankView:
    """The view of the only rank."""
    (view,) = look_at([RankView(record_of(rank), rank.at[0], seconds=seconds)])
    return view


def test_what_it_waits_in(rank: Rank) -> None:
    before = record_of(rank)
    assert (before.rank, before.phase, before.pid) == (3, STARTED, rank.at[0])
    assert (before.status, before.words, before.calls, before.moved) == (WORKS, "", 380, 0)
    assert (before.stall_seconds, before.hang_seconds) == (10.0, 600.0)
    assert waited(before, time.monotonic()) == 0.0
    rank.do("wait")
    rank.do("move")
    after = record_of(rank)
    assert (after.status, after.since, after.moved) == (WAITS, 12.5, 1)
    assert after.words == "allreduce " + "x" * 390  # the rest is cut off
    assert waited(after, 15.0) == 2.5


def test_its_steps_and_metrics_and_the_folder_of_its_record(rank: Rank) -> None:
    empty = record_of(rank)
    assert (empty.first_step, empty.step, empty.facts, empty.metrics, empty.record_folder) == (0, 0, {}, {}, "")
    for step in (99, 100, 101):
        rank.do(f"step {step}")
    record = record_of(rank)
    assert (record.first_step, record.step, record.facts) == (99, 101, {"step": 101, "epoch": 2})
    assert record.metrics == {"loss": 1 / 101, "samples/s": 100.5}
    rank.do("record /runs/1 1")
    rank.do("wait")
    assert record_of(rank).record_folder == "/runs/1"
    rank.do("record /abc 100")
    assert record_of(rank).record_folder == "/abc" * 100
    rank.do("record /abcd 81")  # a part of a path would be another path
    assert record_of(rank).record_folder == ""


def test_metrics_that_find_no_room_are_left_out(rank: Rank) -> None:
    rank.do("many")  # names of 69 or 70 bytes, each with a separator: 800 bytes hold 11
    assert list(record_of(rank).metrics.values()) == [float(number) for number in range(11)]
    rank.do("step 1")  # 800 - (10 * 70 + 71) bytes are left for the names
    assert list(record_of(rank).metrics)[11:] == ["loss", "samples/s"]


def test_its_end(rank: Rank) -> None:
    rank.do("fork")
    assert record_of(rank).phase == STARTED  # a forked child is not a rank
    rank.do("fail")
    record = record_of(rank)
    assert (record.phase, record.error, record.failed_seconds) == (FAILED, "ValueError: bang", 123.25)


def test_a_record_outlives_its_rank(rank: Rank) -> None:
    """But not a write that was in the middle: a reader would find a limit of 0 s, and divide by it."""
    rank.do("step 7")
    pid, descriptor = rank.at
    kept = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    rank.process.kill()
    rank.process.wait()
    record = read_record(f"/proc/self/fd/{kept}", 3)
    assert (record.pid, record.step) == (pid, 7)
    os.pwrite(kept, (99).to_bytes(8, "little"), 0)  # the number of a write that has begun
    assert read_record(f"/proc/self/fd/{kept}", 3) is None
    os.close(kept)


def test_another_process_is_not_taken_for_it(rank: Rank) -> None:
    rank.do("nest")  # waits that end in another order
    record = record_of(rank)
    assert (record.status, record.words, record.since) == (WAITS, "mean", 2.0)
    pid, descriptor = rank.at
    path = f"/proc/{pid}/fd/{descriptor}"
    assert read_record(path, 4) is None
    assert read_record(f"/proc/{os.getpid()}/fd/{descriptor}", 3) is None
    # Another process has the number of one that has ended.
    (view,) = look_at([RankView(record, pid, ended_seconds=5.0)])
    assert (view.state, view.stack) == ("gone", "")
    assert view_of(rank).state == "S"
    rank.process.kill()
    rank.process.wait()
    assert read_record(path, 3) is None
    assert process_state(pid) == "gone"


def test_the_stack_of_a_loop(rank: Rank) -> None:
    rank.do("loop")
    view = view_of(rank)
    assert (view.state, view.kernel, view.seconds) == ("R", "", 0.0)
    blocks = view.stack.split("\n\n")
    assert len(blocks) == 2  # two threads, the main one last
    line = next(number for number, text in enumerate(RANK.split("\n"), 1) if "while True: pass" in text)
    assert re.search(rf'File "<string>", line ({line - 1}|{line}) in load', blocks[-1])
    assert rank.process.poll() is None
    assert view_of(rank).stack.count("most recent call first") == 2  # without the earlier stacks


def test_a_stack_that_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has to wait for a core between the pieces."""
    monkeypatch.setattr(view, "_STACK_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(view, "_QUIET_SECONDS", 3.0)
    source = f"""
import signal, sys, time
file = open({str(tmp_path / "stack")!r}, "ab", buffering=0)
def write(*_):
    file.write(b"first ")
    time.sleep(0.5)
    file.write(b"second")
signal.signal({int(STACK_SIGNAL)}, write)
print(file.fileno(), flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe, text=True) as other:
        descriptor = int(other.stdout.readline())
        assert read_stacks({0: (other.pid, descriptor)}) == {0: "first second"}


def test_a_stopped_rank_is_not_asked(rank: Rank) -> None:
    os.kill(rank.at[0], signal.SIGSTOP)
    until(lambda: process_state(rank.at[0]) == "T")
    view = view_of(rank, seconds=7.0)
    assert (view.state, view.seconds, view.stack) == ("T", 7.0, "")


def test_a_process_without_a_handler_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (view,) = look_at([RankView(RankRecord(0, stacks=0), other.pid)])
        assert view.stack == ""
        assert other.poll() is None


PATH = "/proc/self/fd/{}"


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page(3)
    page.write(RankRecord(3), 0, "", 0.0)
    yield page
    os.close(page.descriptor)


def record_on(page: Page) -> RankRecord:
    record = read_record(PATH.format(page.descriptor), 3)
    assert record is not None
    return record


def test_a_text_that_finds_no_room_changes_nothing(page: Page) -> None:
    write_order(page.descriptor, {"number": 1, "value": "first"})
    page.set_steering("a" * MOST_STEERING_BYTES)
    with pytest.raises(ValueError, match=f"a text of {MOST_STEERING_BYTES + 1} bytes"):
        page.set_steering("b" * (MOST_STEERING_BYTES + 1))
    with pytest.raises(ValueError, match=f"at most {MOST_ORDER_BYTES} fit"):
        write_order(page.descriptor, {"number": 2, "value": "\1" * 900})
    assert record_on(page).steering == "a" * MOST_STEERING_BYTES
    assert (page.order_number, page.order()["value"]) == (1, "first")


def test_it_has_a_checkpoint_from_the_first_one_on(page: Page) -> None:
    assert not record_on(page).has_checkpoint
    page.set_checkpoint()
    assert record_on(page).has_checkpoint


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("epoch", -1, "the fact 'epoch' of a rank is -1; allowed is a whole number from 0 to 2^64 - 1"),
        ("epoch", 1.0, "the fact 'epoch' of a rank is 1.0; allowed is a whole"),
        ("waited", "1", "the fact 'waited' of a rank is '1'; allowed is a number"),
        ("steps", 1, "a rank has no fact 'steps'; allowed are step, epoch, waited"),
    ],
)
def test_a_wrong_fact_is_refused_by_name(page: Page, name: str, value: Any, why: str) -> None:
    page.publish("epoch", 2)
    page.publish("waited", 1.5)
    with pytest.raises(ValueError, match=re.escape(why)):
        page.publish(name, value)
    assert record_on(page).facts == {"epoch": 2, "waited": 1.5}


def test_the_longest_texts_do_not_meet(page: Page) -> None:
    page.publish("step", 7)
    order = {"number": 1, "value": "c" * (MOST_ORDER_BYTES - len('{"number": 1, "value": ""}'))}
    write_order(page.descriptor, order)
    page.set_steering("a" * MOST_STEERING_BYTES)
    assert page.order() == order
    record = record_on(page)
    assert (record.step, record.steering) == (7, "a" * MOST_STEERING_BYTES)


@pytest.mark.parametrize("num_torn", [1, 4, 5])
def test_a_write_begins_while_the_page_is_read(page: Page, monkeypatch: pytest.MonkeyPatch, num_torn: int) -> None:
    """Where the reader takes the page, half of the text is there, and the write ends before the reader does."""
    page.set_steering("first")
    left = [num_torn]
    read, read_all = os.pread, Path.read_bytes

    def torn(take: Callable[[], bytes]) -> bytes:
        if not left[0]:
            return take()
        left[0] -= 1
        page.set_steering("other")
        return take().replace(b"other", b"ot\0\0\0")

    def pread(descriptor: int, length: int, place: int) -> bytes:
        take = lambda: read(descriptor, length, place)  # noqa: E731
        return take() if length == 8 else torn(take)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(Path, "read_bytes", lambda path: torn(lambda: read_all(path)))
    record = read_record(PATH.format(page.descriptor), 3)
    assert record is None if num_torn == 5 else record is not None and record.steering == "other"
