"""Output is cut into lines and merged, with a made-up clock."""

from __future__ import annotations

import pytest

from mpitrain.launch.output import MERGE_SECONDS, MPIEXEC, PARTIAL_SECONDS, LineCutter, Merger, OutputPiece
from mpitrain.watching.ranges import rank_ranges

LONG = 1000.0


def lines(merger: Merger, now: float) -> list[tuple[tuple[int, ...], str]]:
    return [(ranks, piece.text.decode()) for ranks, piece in merger.ready(now)]


def feed(merger: Merger, now: float, rank: int, *texts: str) -> None:
    for text in texts:
        merger.feed(now, rank, OutputPiece(text.encode(), b"\n"))


def test_equal_lines_of_all_ranks_leave_at_once_as_one() -> None:
    merger = Merger(3)
    for rank in (2, 0, 1):
        feed(merger, 0.0, rank, "loss 0.3")
    assert lines(merger, 0.0) == [((0, 1, 2), "loss 0.3")]
    assert not merger.is_waiting


def test_a_line_of_some_ranks_waits_for_the_others_but_not_long() -> None:
    merger = Merger(3)
    feed(merger, 0.0, 0, "loss 0.3")
    feed(merger, 0.05, 2, "loss 0.3")
    assert lines(merger, MERGE_SECONDS - 0.01) == []
    assert lines(merger, MERGE_SECONDS) == [((0, 2), "loss 0.3")]
    feed(merger, LONG, 1, "loss 0.3")
    assert lines(merger, 2 * LONG) == [((1,), "loss 0.3")]


def test_a_rank_that_repeats_itself_is_not_merged_with_itself() -> None:
    merger = Merger(2)
    feed(merger, 0.0, 0, "x", "x", "x")
    feed(merger, 0.0, 1, "x", "x")
    assert lines(merger, LONG) == [((0, 1), "x"), ((0, 1), "x"), ((0,), "x")]


def test_the_order_of_every_rank_is_kept() -> None:
    merger = Merger(2)
    feed(merger, 0.0, 0, "a", "b")
    feed(merger, 0.0, 1, "b", "a")
    assert lines(merger, LONG) == [((0,), "a"), ((0, 1), "b"), ((1,), "a")]


def test_a_complete_line_does_not_overtake() -> None:
    merger = Merger(2)
    feed(merger, 0.0, 0, "only 0", "both")
    feed(merger, 0.0, 1, "both")
    assert lines(merger, 0.0) == []
    assert lines(merger, MERGE_SECONDS) == [((0,), "only 0"), ((0, 1), "both")]


def test_what_mpiexec_says_does_not_wait() -> None:
    merger = Merger(4)
    feed(merger, 0.0, MPIEXEC, "bad", "bad")
    assert lines(merger, 0.0) == [((MPIEXEC,), "bad"), ((MPIEXEC,), "bad")]


def test_a_flood_is_passed_on() -> None:
    merger = Merger(2)
    feed(merger, 0.0, 0, *(str(i) for i in range(1000)))
    passed_on = [text for _, text in lines(merger, 0.0)]
    assert len(passed_on) > 700
    assert passed_on + [text for _, text in lines(merger, LONG)] == [str(i) for i in range(1000)]


def test_cutter_joins_what_the_pipe_has_cut() -> None:
    cutter = LineCutter()
    assert list(cutter.feed(0.0, 0, b"lo")) == []
    assert list(cutter.feed(0.0, 1, b"other\n")) == [OutputPiece(b"other", b"\n")]
    assert list(cutter.feed(0.0, 0, b"ss\r\n\n50 %\rrest")) == [
        OutputPiece(b"loss", b"\n"),
        OutputPiece(b"", b"\n"),
        OutputPiece(b"50 %", b"\r"),
    ]
    assert cutter.is_waiting


def test_a_prompt_is_shown_although_its_line_has_no_end() -> None:
    cutter = LineCutter()
    assert list(cutter.feed(1.0, 0, b"continue? ")) == []
    assert list(cutter.overdue(1.0)) == []
    assert list(cutter.overdue(1.0 + PARTIAL_SECONDS)) == [(0, OutputPiece(b"continue? ", b""))]
    assert not cutter.is_waiting
    assert list(cutter.feed(LONG, 0, b"yes\n")) == [OutputPiece(b"yes", b"\n")]


def test_a_very_long_line_takes_no_quadratic_time() -> None:
    cutter = LineCutter()
    for _ in range(64):
        assert list(cutter.feed(0.0, 0, b"x" * 65536)) == []
    assert [len(piece.text) for piece in cutter.feed(0.0, 0, b"\n")] == [64 * 65536]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0,1"), ((0, 1, 2, 3), "0-3"), ((0, 2), "0,2"), ((0, 1, 2, 5, 7, 8, 9), "0-2,5,7-9")],
)
def test_rank_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert rank_ranges(ranks) == text
