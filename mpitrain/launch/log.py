"""What the launcher has said of its job, and the last lines that each rank has printed, for those who watch (live.py).

    the launcher's own lines ──> stderr, and the last 100 of them ─────────────────────────────────────────┐
    a rank's pieces (output.py) ──> its lines, as a terminal would show them ──on request──> equal lines joined

The lines of all attempts of a job are kept, because those of an attempt that failed say why
(docs/reference/formats-and-protocols.md).
"""

from __future__ import annotations

import heapq
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from mpitrain.context import BAR_START
from mpitrain.launch.job_logs import LOGS
from mpitrain.launch.output import MPIEXEC, Merger, OutputPiece, Stream
from mpitrain.watching.ranges import rank_ranges

_MOST_EVENTS = 100

_events: deque[tuple[float, str]] = deque(maxlen=_MOST_EVENTS)


def say(text: str) -> None:
    """Print a line to stderr, and note it."""
    note(text)
    LOGS.show(f"mpitrain: {text}\n".encode(errors="backslashreplace"))
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Note an event that is printed elsewhere."""
    _events.append((time.time(), text))


def noted() -> list[dict[str, float | str]]:
    """Return the last events, oldest first: `at`, in seconds since the epoch, and `text`."""
    return [{"at": at, "text": text} for at, text in tuple(_events)]


MOST_RANK_BYTES = 1 << 16
MOST_BYTES = 1 << 24  # of all ranks together
MOST_LINE_BYTES = 4096  # what is behind is counted, and not kept
MOST_LINES = 1000  # in an answer
MOST_ANSWER_LETTERS = 1 << 20
_OVERHEAD_BYTES = 128  # of a line, so that empty ones fill the memory too

# Colours and the like, and titles of terminals.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
# Control characters except the tab, separators of lines, and what turns the direction of writing.
_CONTROLS = re.compile("[\0-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass
class _Line:
    number: int  # increases with the time at which a line began
    rank: int
    stream: Stream
    at: float = 0.0  # when the last of it came, by time.time()
    text: bytes = b""
    num_cut: int = 0  # bytes that were not kept
    is_redrawn: bool = False  # what comes next overwrites it
    is_gone: bool = False  # it was drawn again, further down

    def write(self, text: bytes) -> None:
        if text and self.is_redrawn:
            self.text, self.num_cut = b"", 0
        if self.num_cut or len(self.text) + len(text) > MOST_LINE_BYTES:
            whole = self.text if self.num_cut else self.text + text[: MOST_LINE_BYTES + 1]
            fitting = _cut(whole)
            self.num_cut += len(self.text) + len(text) - len(fitting)
            self.text = fitting
        else:
            self.text += text


def _cut(text: bytes) -> bytes:
    """Return the beginning of a text, whose last letter is whole."""
    end = min(len(text), MOST_LINE_BYTES)
    for back in range(4 if end < len(text) else 0):
        if text[end - back] & 0xC0 != 0x80:
            return text[: end - back]
    return text[:end]


@dataclass(frozen=True)
class _Found:
    """A line of an answer. Two with the same text and stream may be joined."""

    stream: Stream
    text: str
    at: float = field(compare=False)
    num_cut: int = field(compare=False)


class Wanted(NamedTuple):
    """Which lines are wanted.

    Attributes:
        ranks: those of these ranks; None: all, and those of mpiexec.
        text: those with this text, in upper or lower case; "": all.
    """

    ranks: frozenset[int] | None = None
    text: str = ""


class KeptOutput:
    """The last lines of each rank. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all: another job begins."""
        with self._lock:
            self._lines: dict[int, deque[_Line]] = {}  # by rank
            self._open: dict[tuple[int, Stream], _Line] = {}
            self._bytes: dict[int, int] = {}
            self._dropped: dict[int, int] = {}
            self._number = 0

    def take(self, rank: int, stream: Stream, piece: OutputPiece, num_ranks: int) -> None:
        """Take in a piece of what a rank has printed; `num_ranks` of them share the memory."""
        text, end = piece
        if end == b"\r" and BAR_START in text:  # the page has what the bar shows
            text, end = text.rpartition(BAR_START)[0], b""
            if not text:
                return
        most = min(MOST_RANK_BYTES, MOST_BYTES // num_ranks)
        with self._lock:
            line = self._line(rank, stream)
            self._bytes[rank] -= len(line.text)
            line.write(text)
            line.at, line.is_redrawn = time.time(), end == b"\r"
            self._bytes[rank] += len(line.text)
            if end == b"\n":
                del self._open[rank, stream]
            self._drop(rank, most)

    def _line(self, rank: int, stream: Stream) -> _Line:
        """Return the line that a rank has not finished; where there is none, a new one."""
        lines = self._lines.setdefault(rank, deque())
        line = self._open.get((rank, stream))
        if line is not None and (lines[-1] is line or not line.is_redrawn):
            return line
        if line is not None:  # a line of progress stays below what was printed since
            self._bytes[rank] -= len(line.text)
            line.text, line.is_gone = b"", True
        self._number += 1
        line = _Line(self._number, rank, stream)
        lines.append(line)
        self._open[rank, stream] = line
        self._bytes[rank] = self._bytes.get(rank, 0) + _OVERHEAD_BYTES
        return line

    def _drop(self, rank: int, most: int) -> None:
        lines = self._lines[rank]
        while self._bytes[rank] > most and len(lines) > 1:
            old = lines.popleft()
            self._bytes[rank] -= len(old.text) + _OVERHEAD_BYTES
            self._dropped[rank] = self._dropped.get(rank, 0) + (not old.is_gone)
            if self._open.get((rank, old.stream)) is old:
                del self._open[rank, old.stream]

    def end_lines(self) -> None:
        """End the lines that are not finished: what follows is another attempt's."""
        with self._lock:
            self._open.clear()

    def newest(self, rank: int, most: int) -> list[str]:
        """Return at most so many of the last lines of a rank, the newest first."""
        with self._lock:
            lines = [line.text for line in islice(reversed(self._lines.get(rank, ())), most)]
        return [printable(text) for text in lines]

    def find(self, wanted: Wanted) -> dict[str, Any]:
        """Return the newest lines that are wanted, as docs/reference/formats-and-protocols.md describes `output`."""
        with self._lock:
            chosen = {rank for rank in self._lines if wanted.ranks is None or rank in wanted.ranks}
            kept = [list(reversed(self._lines[rank])) for rank in chosen]
            num_dropped = sum(self._dropped.get(rank, 0) for rank in chosen)
        lines: list[dict[str, Any]] = []
        size, has_more = 0, False
        for ranks, joined in _joined(kept, wanted.text.casefold()):
            size += len(joined.text)
            has_more = len(lines) == MOST_LINES or size > MOST_ANSWER_LETTERS
            if has_more:
                break
            lines.append(
                {
                    "at": joined.at,
                    "ranks": "" if MPIEXEC in ranks else rank_ranges(ranks),
                    "stream": joined.stream,
                    "text": joined.text,
                    "cut": joined.num_cut,
                }
            )
        return {"lines": lines[::-1], "more": has_more, "dropped": num_dropped}


def _joined(kept: list[list[_Line]], text: str) -> Iterator[tuple[tuple[int, ...], _Found]]:
    """Iterate over the lines with this text, the newest first; equal ones that came together are one."""
    merger: Merger[_Found] = Merger(len(kept))
    for line in heapq.merge(*kept, key=lambda line: -line.number):
        if line.is_gone:
            continue
        shown = printable(line.text)
        if text not in shown.casefold():
            continue
        # The newest come first, so time runs backwards.
        merger.feed(-line.at, line.rank, _Found(line.stream, shown, line.at, line.num_cut))
        yield from merger.ready(-line.at)
    yield from merger.ready(float("inf"))


def printable(text: bytes) -> str:
    """Return a text without codes of terminals. What is no UTF-8, or controls something, is shown as \\x.."""
    letters = _ESCAPES.sub("", text.decode(errors="backslashreplace"))
    return _CONTROLS.sub(lambda letter: letter[0].encode("unicode_escape").decode(), letters)


# Of the job of this process.
KEPT = KeptOutput()
