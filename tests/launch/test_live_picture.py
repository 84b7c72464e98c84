"""What a look says, from what is known of hosts and ranks; when one who watches has it, and who is sent away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan
from typing import Any

from mpitrain.launch.live_picture import add_printed, is_over, of_ranks
from mpitrain.launch.live_watcher import LiveWatcher
from mpitrain.launch.log import KeptOutput
from mpitrain.launch.output import OutputPiece
from mpitrain.launch.watched import SlowRanks
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, ENDED, STARTED, WAITS, WORKS, RankRecord
from mpitrain.watching.view import RankView

PLACES = {"a": range(2), "b": range(2, 4)}


def view(rank: int, host: str, status: int = WORKS, seconds: float = 0.0, **fields: Any) -> RankView:
    record = RankRecord(rank, BEGUN, status=status, words="mean" * (status == WAITS), **fields)
    return RankView(record, 100 + rank, seconds=seconds, state="S", host=host, doing_seconds=seconds)


def waiting(seconds: float) -> list[RankView]:
    return [view(rank, "ab"[rank // 2], WAITS, seconds) for rank in (0, 1, 2)]


def test_hosts_and_ranks_that_are_not_there() -> None:
    """A rank that has not appeared starts. On a silent host any rank may do anything."""
    load = {"cores": 2, "busy": 0.5}
    views = [view(1, "a", facts={"step": 7, "epoch": 2}), view(2, "b", facts={"step": 8, "waited": 0.12345})]
    picture = of_ranks(views, PLACES, {"a": 0.04, "b": 3.1}, {"a": load})
    assert picture["hosts"] == {
        "a": {"silence": 0.0, "ranks": [0, 1], "load": load},
        "b": {"silence": 3.1, "ranks": [2, 3], "load": None},
    }
    fields = ("rank", "host", "pid", "phase", "step", "epoch", "waited")
    assert [tuple(one[field] for field in fields) for one in picture["ranks"]] == [
        (0, "a", 0, "starts", 0, None, 0.0),
        (1, "a", 101, "computes", 7, 2, 0.0),
        (2, "b", 102, "unknown", 8, None, 0.123),
        (3, "b", 0, "unknown", 0, None, 0.0),
    ]
    assert (picture["metrics"], picture["record"], picture["stall"]) == ({}, None, None)


def test_numbers_are_json() -> None:
    metrics = {"loss": nan, "x": inf, "y": -inf, "samples/s": 12.5}
    picture = of_ranks([view(1, "a", metrics=metrics), view(2, "b", record_folder="/runs/1")], PLACES, {})
    assert picture["metrics"] == {"loss": "NaN", "x": "Infinity", "y": "-Infinity", "samples/s": 12.5}
    assert picture["record"] == "/runs/1"
    assert [one["samples_per_second"] for one in picture["ranks"]] == [None, 12.5, None, None]
    json.dumps(picture, allow_nan=False)


def test_who_has_paused_the_training() -> None:
    """All ranks publish the same; one that has not published anything yet says nothing."""
    words = "paused by ada on a on 2026-11-26 08:00:00, after step 7"
    paused = view(2, "b", steering=json.dumps({"run": 1, "paused": words}))
    assert of_ranks([view(1, "a"), paused], PLACES, {})["paused"] == words
    trains = view(1, "a", steering=json.dumps({"run": 1, "paused": ""}))
    over = view(3, "b", steering=json.dumps({"run": 0, "outcomes": []}))
    for views in ([view(1, "a")], [trains], [over], []):
        assert of_ranks(views, PLACES, {})["paused"] == ""


def test_a_script_that_publishes_no_steps() -> None:
    """What it prints has them. Who publishes is believed."""
    kept = KeptOutput()
    for text in (b"step 3 loss 0.5", b"step 4 loss 0.25", b"saved"):
        kept.take(1, "stdout", OutputPiece(text, b"\n"), 2)
    assert kept.newest(1, 2) == ["saved", "step 4 loss 0.25"]

    def lines(rank: int) -> list[str]:
        return kept.newest(rank, 9)

    foreign = [replace(view(rank, "a"), record=RankRecord(rank, STARTED)) for rank in range(2)]
    picture = of_ranks(foreign, {"a": range(2)}, {})
    add_printed(picture, lines)
    assert [(one["step"], one["phase"]) for one in picture["ranks"]] == [(0, "computes"), (4, "computes")]
    assert (picture["metrics"], picture["printed"]) == ({"loss": 0.25}, True)
    picture = of_ranks([view(0, "a", facts={"step": 7}), foreign[1]], {"a": range(2)}, {})
    add_printed(picture, lines)
    assert ([one["step"] for one in picture["ranks"]], picture["printed"]) == ([7, 0], False)


def test_who_waits_for_whom() -> None:
    other = view(3, "b")
    for views, silence, stall in (
        (waiting(4.0), {}, "ranks 0-2 on a,b wait in mean; rank 3 on b sleeps"),
        (waiting(4.0), {"b": 3.6}, "ranks 0,1 on a wait in mean; ranks 2,3 on b: no message from this host"),
    ):
        said = of_ranks([*views, other], PLACES, silence)["stall"]
        assert said.startswith(f"no progress for 4.0 s: {stall}")
    gone = [replace(one, ended_seconds=1.0, state="gone") for one in waiting(4.0)]
    for views in (waiting(0.9), gone):  # in the second case nobody waits any more
        assert of_ranks([*views, other], PLACES, {})["stall"] is None


def test_a_start_is_no_stall() -> None:
    starting = [view(rank, "a", WAITS, 20.0) for rank in (0, 1)]
    calls = [replace(one, record=replace(one.record, phase=CALLED, stall_seconds=30.0)) for one in starting]
    assert of_ranks(calls, {"a": range(2)}, {})["stall"] is None
    long = [replace(one, seconds=30.0) for one in calls]
    assert "ranks 0,1 on a wait in mean" in of_ranks(long, {"a": range(2)}, {})["stall"]


def test_a_lost_rank_holds_nobody_up() -> None:
    going_on = [view(rank, "ab"[rank // 2], lost=(3,)) for rank in (0, 1, 2)]
    picture = of_ranks([*going_on, view(3, "b", WAITS, 60.0)], PLACES, {})
    assert [one["phase"] for one in picture["ranks"]] == ["computes", "computes", "computes", "lost"]
    assert picture["stall"] is None


def test_the_launcher_names_a_slow_rank_once_after_a_while() -> None:
    """Rank 2 computes all the time, from second 70 to 120; then, from second 200, rank 0. Looks are of a minute."""
    slow, said = SlowRanks(), []
    waited = [0.0, 0.0, 0.0]
    for second in range(300):
        if 70 <= second < 120 or second >= 200:
            awaited = 2 if second < 120 else 0
            waited = [sum_ + (rank != awaited) * 0.9 for rank, sum_ in enumerate(waited)]
        views = [view(rank, "a", facts={"step": second + 1, "waited": sum_}) for rank, sum_ in enumerate(waited)]
        said += [(second, text) for text in slow.news(views, 1000.0 + second)]
        assert slow.news(views, 1000.5 + second) == []
    assert [(second, text.partition(":")[0]) for second, text in said] == [
        (92, "rank 2 on a is 1.5x slower"),
        (222, "rank 0 on a is 1.5x slower"),
    ]
    waits = [view(rank, "a", facts={"step": 1, "waited": 0.8 * (rank > 0)}) for rank in range(3)]
    assert SlowRanks().news(waits, 0.0) == []


def test_when_all_is_over() -> None:
    done = RankView(RankRecord(0, DONE, status=ENDED), 100, state="S", host="a")
    ranks = of_ranks([done, view(1, "a")], {"a": range(2)}, {})["ranks"]
    assert not is_over(ranks)
    assert is_over(ranks[:1])
    assert not is_over([])


@contextmanager
def watcher(since: float, request: bytes) -> Iterator[tuple[LiveWatcher, socket.socket]]:
    """One who has come and said this, by a clock of the test's; and the other end."""
    near, far = socket.socketpair()
    with near, far:
        watcher = LiveWatcher(near, since)
        far.sendall(request)
        watcher.receive(since)
        yield watcher, far


def test_who_says_or_reads_nothing_is_sent_away() -> None:
    with watcher(100.0, b'{"wat') as (one, far):
        one.judge(110.0)
        assert not one.is_closed
        one.judge(110.1)
        assert one.is_closed
        assert "no request has come within 10 s" in json.loads(far.makefile().readline())["error"]
    with watcher(100.0, b'{"watch": 0.5, "version": 1}\n') as (one, far):
        look = b"x" * (1 << 20) + b"\n"  # more than a socket holds
        one.look(look, 100.0)
        one.look(b"another\n", 100.5)  # it has not taken the one before, so it misses this one
        one.judge(110.0)
        assert (one.has_unsent, one.is_closed) == (True, False)
        one.judge(110.1)
        assert one.is_closed
        one.close()
        assert look.startswith(far.makefile("rb").read())


def test_looks_are_due_at_whole_multiples() -> None:
    """So many watchers have one look together."""
    with watcher(100.3, b'{"watch": 0.5, "version": 1}\n') as (one, far):
        assert (one.due, one.asked) == (100.3, 100.3)
        for now, due in ((100.3, 100.5), (100.5, 101.0), (103.7, 104.0)):
            one.look(b"look\n", now)
            assert one.due == due
        far.sendall(b'{"look": 1, "version": 1}\n')
        one.receive(104.0)
        one.look(b"last\n", 104.0)
        assert (one.due, one.is_closed) == (None, True)
