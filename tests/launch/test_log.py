"""What the launcher keeps of the output of ranks: lines as a terminal shows them, within bounds, and who finds them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from mpitrain.launch import log
from mpitrain.launch.log import KEPT, MOST_LINE_BYTES, MOST_RANK_BYTES, KeptOutput, Wanted, printable
from mpitrain.launch.output import MPIEXEC, OutputPiece, Stream, Tag
from mpitrain.launch.printer import Printer

RANKS = 4


def kept(*printed: tuple[int, bytes, bytes], stream: Stream = "stdout") -> KeptOutput:
    """Ranks have printed these pieces, each with its end."""
    made = KeptOutput()
    for rank, text, end in printed:
        made.take(rank, stream, OutputPiece(text, end), RANKS)
    return made


def found(made: KeptOutput, ranks: frozenset[int] | None = None, text: str = "") -> list[tuple[str, str]]:
    return [(line["ranks"], line["text"]) for line in made.find(Wanted(ranks, text))["lines"]]


def test_equal_lines_are_joined_and_the_order_of_each_rank_is_kept() -> None:
    made = kept(*((rank, text, b"\n") for text in (b"a", b"b") for rank in range(RANKS)), (2, b"c", b"\n"))
    assert found(made) == [("0-3", "a"), ("0-3", "b"), ("2", "c")]
    made.take(3, "stderr", OutputPiece(b"c", b"\n"), RANKS)
    assert found(made)[2:] == [("2", "c"), ("3", "c")], "a line from both streams is two"
    made = kept((0, b"a", b"\n"), (0, b"b", b"\n"), (1, b"b", b"\n"), (1, b"a", b"\n"))
    lines = found(made)
    for rank, order in (("0", "ab"), ("1", "ba")):
        assert "".join(text for ranks, text in lines if rank in ranks) == order


def test_who_asks_for_ranks_and_text_gets_these() -> None:
    made = kept(*((rank, b"Loss 0.%d" % (rank // 2), b"\n") for rank in range(RANKS)), (MPIEXEC, b"loss of all", b"\n"))
    assert found(made, frozenset({1, 2, 9})) == [("1", "Loss 0.0"), ("2", "Loss 0.1")]
    assert found(made, None, "lOSS 0.1") == [("2,3", "Loss 0.1")]
    assert found(made, None, "loss") == [("0,1", "Loss 0.0"), ("2,3", "Loss 0.1"), ("", "loss of all")]
    assert found(made, frozenset()) == found(made, None, "gain") == []


def test_progress_overwrites_itself_and_stays_below() -> None:
    made = kept((0, b"", b"\r"), (0, b"10 %", b"\r"), (0, b"20 %", b"\r"), (0, b"load", b""), (0, b"ing", b""))
    assert found(made) == [("0", "loading")]
    made = kept((0, b"10 %", b"\r"))
    made.take(0, "stderr", OutputPiece(b"careful", b"\n"), RANKS)
    made.take(0, "stdout", OutputPiece(b"20 %", b"\r"), RANKS)
    assert found(made) == [("0", "careful"), ("0", "20 %")]
    made.take(0, "stdout", OutputPiece(b"", b"\n"), RANKS)
    made.take(0, "stdout", OutputPiece(b"next", b"\n"), RANKS)
    assert found(made) == [("0", "careful"), ("0", "20 %"), ("0", "next")]
    made.take(0, "stdout", OutputPiece(b"no end", b""), RANKS)
    made.end_lines()  # those of an attempt end with it
    made.take(0, "stdout", OutputPiece(b"the next attempt", b"\n"), RANKS)
    assert found(made)[3:] == [("0", "no end"), ("0", "the next attempt")]


@pytest.mark.parametrize("size", [MOST_LINE_BYTES, MOST_LINE_BYTES + 1, 10 * MOST_LINE_BYTES])
def test_a_long_line_is_cut_between_two_letters(size: int) -> None:
    """However it comes. An e with an accent has two bytes, so with one letter before it the limit is in the middle."""
    text = b"x" + "é".encode() * (size // 2)
    for step in (len(text), 1000, 7):
        made = kept(*((0, text[begin : begin + step], b"") for begin in range(0, len(text), step)), (0, b"", b"\n"))
        (line,) = made.find(Wanted())["lines"]
        fitting = 1 + 2 * min(size // 2, (MOST_LINE_BYTES - 1) // 2)
        assert (line["text"].encode(), line["cut"]) == (text[:fitting], len(text) - fitting)


def test_what_is_kept_is_bounded() -> None:
    """Also with empty lines, and with ranks that share the memory of all."""
    random.seed(1)
    made = KeptOutput()
    for number in range(3000):
        made.take(0, "stdout", OutputPiece(b"%d " % number + b"x" * random.randrange(100), b"\n"), RANKS)
        made.take(1, "stdout", OutputPiece(b"", b"\n"), RANKS)
        made.take(2, "stderr", OutputPiece(b"%d" % number, b"\r"), RANKS)  # a line of progress takes no more
        made.take(2, "stdout", OutputPiece(b"y", b"\n"), RANKS)
        made.take(3, "stdout", OutputPiece(b"few", b"\n"), 16 * MOST_RANK_BYTES)  # 16 bytes each
    for rank, least in ((0, 250), (1, 400), (2, 200)):
        answer = made.find(Wanted(frozenset({rank})))
        texts = [line["text"] for line in answer["lines"]]
        assert least < len(texts) <= MOST_RANK_BYTES // 128 + 1, rank
        assert sum(128 + len(text) for text in texts) <= MOST_RANK_BYTES + 128
        assert answer["dropped"] >= 3000 - len(texts)
        assert not answer["more"]
    assert found(made, frozenset({0}))[-1][1].startswith("2999 ")
    assert found(made, frozenset({2}))[-2:] == [("2", "2999"), ("2", "y")]
    assert found(made, frozenset({3})) == [("3", "few")]


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the newest lines."""
    made = KeptOutput()
    for number in range(300):
        for rank in range(5):
            made.take(rank, "stdout", OutputPiece(b"%d %d" % (rank, number), b"\n"), RANKS)
    answer = made.find(Wanted())
    assert (len(answer["lines"]), answer["more"], answer["dropped"]) == (1000, True, 0)
    assert [line["text"] for line in answer["lines"]] == [
        f"{rank} {number}" for number in range(100, 300) for rank in range(5)
    ]
    monkeypatch.setattr(log, "MOST_ANSWER_LETTERS", 12)
    answer = made.find(Wanted())
    assert ([line["text"] for line in answer["lines"]], answer["more"]) == (["3 299", "4 299"], True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"\x1b[31mred\x1b[0m \x1b[1;38;5;3mloss\x1b[K", "red loss"),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1bM", "alink "),
        (b"\x1b", "\\x1b"),
        (b"a\tb\x07\x00\x7f\xc2\x9b31m", "a\tb\\x07\\x00\\x7f\\x9b31m"),
        (b"\xff\xfe caf\xc3\xa9 \xe2\x82", "\\xff\\xfe café \\xe2\\x82"),
        ("a\u202eb\u2066c\u2028d".encode(), "a\\u202eb\\u2066c\\u2028d"),
        (b"<img src=x>", "<img src=x>"),
    ],
)
def test_what_would_control_a_terminal_is_shown_as_text(text: bytes, shown: str) -> None:
    assert printable(text) == shown


def test_what_a_job_prints_is_kept(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """And the bar below all other output is not."""
    KEPT.clear()
    printer = Printer(Tag(*"<", r"(\d+)", ">"), 2, shows_bar=True)
    before = time.time()
    printer.feed(0.0, "stdout", b"<0>half\x1b[2Kbar 1\r<0> a\n<1>\x1b[2Kbar 2\r<1>b\n")
    printer.feed(0.0, "stderr", b"mpiexec says\n<1>unfinished")
    printer.close()
    assert b"unfinished" in b"".join(capfdbinary.readouterr())
    lines: list[dict[str, Any]] = KEPT.find(Wanted())["lines"]
    assert [(line["ranks"], line["stream"], line["text"]) for line in lines] == [
        ("0", "stdout", "half a"),
        ("1", "stdout", "b"),
        ("", "stderr", "mpiexec says"),
        ("1", "stderr", "unfinished"),
    ]
    assert all(before <= line["at"] <= time.time() for line in lines)
    KEPT.clear()
