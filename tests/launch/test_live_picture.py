"""What a look says, from what is known of hosts and ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from typing import Any

from mpitrain.launch.live_picture import is_over, of_ranks
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, ENDED, WAITS, WORKS, RankRecord
from mpitrain.watching.view import RankView

PLACES = {"a": range(2), "b": range(2, 4)}


def view(rank: int, host: str, status: int = WORKS, seconds: float = 0.0, **fields: Any) -> RankView:
    record = RankRecord(rank, BEGUN, status=status, words="mean" * (status == WAITS), **fields)
    return RankView(record, 100 + rank, seconds=seconds, state="S", host=host, doing_seconds=seconds)


def test_hosts_and_ranks_that_are_not_there() -> None:
    """A rank that has not appeared starts. On a silent host any rank may do anything."""
    load = {"cores": 2, "busy": 0.5}
    views = [view(1, "a", step=7, epoch=2), view(2, "b", step=8)]
    picture = of_ranks(views, PLACES, {"a": 0.04, "b": 3.1}, {"a": load})
    assert picture["hosts"] == {
        "a": {"silence": 0.0, "ranks": [0, 1], "load": load},
        "b": {"silence": 3.1, "ranks": [2, 3], "load": None},
    }
    known = [
        (one["rank"], one["host"], one["pid"], one["phase"], one["step"], one["epoch"]) for one in picture["ranks"]
    ]
    assert known == [
        (0, "a", 0, "starts", 0, None),
        (1, "a", 101, "computes", 7, 2),
        (2, "b", 102, "unknown", 8, None),
        (3, "b", 0, "unknown", 0, None),
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


def test_who_waits_for_whom() -> None:
    waiting = [view(rank, "ab"[rank // 2], WAITS, 4.0) for rank in (0, 1, 2)]
    others = [view(3, "b")]
    stall = of_ranks([*waiting, *others], PLACES, {})["stall"]
    assert stall.startswith("no progress for 4.0 s: ranks 0-2 on a,b wait in mean; rank 3 on b sleeps")
    short = [view(rank, "ab"[rank // 2], WAITS, 0.9) for rank in (0, 1, 2)]
    assert of_ranks([*short, *others], PLACES, {})["stall"] is None


def test_a_stall_where_a_host_is_silent_or_a_rank_has_gone() -> None:
    waiting = [view(rank, "ab"[rank // 2], WAITS, 4.0) for rank in (0, 1, 2)]
    stall = of_ranks([*waiting, view(3, "b")], PLACES, {"b": 3.6})["stall"]
    assert stall.startswith(
        "no progress for 4.0 s: ranks 0,1 on a wait in mean; ranks 2,3 on b: no message from this host"
    )
    gone = [replace(one, ended_seconds=1.0, state="gone") for one in waiting]
    assert of_ranks([*gone, view(3, "b")], PLACES, {})["stall"] is None  # nobody waits any more


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


def test_when_all_is_over() -> None:
    done = RankView(RankRecord(0, DONE, status=ENDED), 100, state="S", host="a")
    ranks = of_ranks([done, view(1, "a")], {"a": range(2)}, {})["ranks"]
    assert not is_over(ranks)
    assert is_over(ranks[:1])
    assert not is_over([])
