"""Who waits for whom, from what a launcher says of its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.dashboard.waits import who_waits


def rank(number: int, phase: str, calls: int, call: str = "", since: float = 5.0, still: float = 5.0) -> dict[str, Any]:
    return {
        "rank": number,
        "host": "ab"[number // 2],
        "phase": phase,
        "calls": calls,
        "call": call,
        "since": since,
        "still": still,
    }


def test_a_rank_that_has_not_entered_the_call() -> None:
    ranks = [rank(number, "waits", 7, "allreduce of w", since=10.0 + number) for number in (0, 1, 3)]
    found = who_waits({"ranks": [*ranks, rank(2, "computes", 6, since=30.0, still=0.0)]})
    assert found == {
        "text": "Ranks 0,1,3 wait in allreduce of w (call 7), for 13 s. Rank 2 has not entered it.",
        "rows": [
            {"ranks": "2", "hosts": ["b"], "does": "computes, after call 6", "seconds": 30.0, "is_awaited": True},
            {
                "ranks": "0,1,3",
                "hosts": ["a", "b"],
                "does": "waits in allreduce of w (call 7)",
                "seconds": 13.0,
                "is_awaited": False,
            },
        ],
    }


@pytest.mark.parametrize(
    ("others", "text", "does"),
    [
        ([rank(1, "waits", 7, "sum")], "All ranks have entered it.", ["waits in sum (call 7)"]),
        ([rank(1, "computes", 7)], "All ranks have entered it.", ["waits in sum (call 7)"]),
        (
            [rank(1, "stopped", 7, "sum"), rank(2, "disk", 7)],
            "Ranks 1,2 have entered it, and do not go on.",
            ["stopped, after call 7: sum", "disk, after call 7", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "starts", 0), rank(2, "starts", 0), rank(3, "done", 6)],
            "Ranks 1-3 have not entered it.",
            ["starts", "done, after call 6", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "waits", 6, "broadcast"), rank(2, "waits", 6, "broadcast", still=0.5)],
            "Ranks 1,2 wait in an earlier call.",
            ["waits in broadcast (call 6)", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "waits", 6, "sum", since=0.5, still=0.5)],  # it has just begun to wait
            "Rank 1 waits in an earlier call.",
            ["waits in sum (call 6)", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "lost", 3), rank(2, "busy", 7, "a checkpoint")],
            "Rank 2 has entered it, and does not go on.",
            ["busy, after call 7: a checkpoint", "waits in sum (call 7)"],
        ),
    ],
)
def test_what_the_others_do(others: list[dict[str, Any]], text: str, does: list[str]) -> None:
    found = who_waits({"ranks": [rank(0, "waits", 7, "sum"), *others]})
    assert found is not None
    assert found["text"].endswith(f" wait in sum (call 7), for 5 s. {text}") or found["text"] == (
        f"Rank 0 waits in sum (call 7), for 5 s. {text}"
    )
    assert [row["does"] for row in found["rows"]] == does


def test_nobody_waits_for_long() -> None:
    assert who_waits({"ranks": []}) is None
    assert who_waits({"ranks": [rank(0, "waits", 7, "sum", still=0.9), rank(1, "computes", 6)]}) is None
    assert who_waits({"ranks": [rank(0, "wire", 7, "sum"), rank(1, "computes", 6)]}) is None
    older = [{key: value for key, value in rank(0, "waits", 7, "sum").items() if key != "calls"}]
    assert who_waits({"ranks": older}) is None, "a launcher that does not tell the calls"
