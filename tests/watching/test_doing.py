"""What a rank does, in one word."""

from __future__ import annotations

import pytest

from mpitrain.watching.hang_report import doing
from mpitrain.watching.rank_record import (
    BEGUN,
    BUSY,
    CALLED,
    DONE,
    ENDED,
    FAILED,
    PARTED,
    STARTED,
    WAITS,
    WORKS,
    RankRecord,
)
from mpitrain.watching.view import RankView


def seen(phase: str, status: int, state: str = "S", **fields: float) -> RankView:
    return RankView(RankRecord(0, phase, status=status), 100, state=state, **fields)


@pytest.mark.parametrize(
    ("view", "word"),
    [
        (seen(STARTED, WORKS, "R"), "starts"),
        (seen(CALLED, WAITS, seconds=3.0, doing_seconds=3.0), "starts"),
        (seen(BEGUN, WORKS, "R"), "computes"),
        (seen(BEGUN, WORKS, ""), "computes"),  # nobody has looked at its process
        (seen(BEGUN, WAITS, seconds=0.2, doing_seconds=0.2), "waits"),  # nothing has moved since the wait began
        (seen(BEGUN, WAITS, seconds=0.2, doing_seconds=0.3), "wire"),
        (seen(BEGUN, WAITS, seconds=1.5, doing_seconds=9.0), "waits"),  # nothing has moved for long
        (seen(BEGUN, BUSY, "S"), "busy"),
        (seen(BEGUN, BUSY, "D"), "disk"),
        (seen(BEGUN, WAITS, "T", seconds=9.0), "stopped"),
        (seen(CALLED, WORKS, "t"), "stopped"),
        (seen(DONE, ENDED), "done"),
        (seen(PARTED, ENDED), "done"),
        (seen(FAILED, WORKS, "T"), "failed"),
        (seen(BEGUN, WORKS, "Z"), "ended"),
        (seen(FAILED, WORKS, "gone"), "ended"),
        (seen(BEGUN, WORKS, "S", ended_seconds=0.0), "ended"),
    ],
)
def test_the_word(view: RankView, word: str) -> None:
    assert doing(view) == word
