"""The output of the ranks as one readable stream: `[0-3] loss 0.31` instead of the same line four times.

    mpiexec's pipe ── TagDecoder ──> a rank's bytes ── LineCutter ──> pieces ── Merger ──> pieces with their ranks

Which rank wrote what is in the tags that mpiexec puts into its single pipe. Open MPI tags whole lines. Hydra (MPICH,
Intel MPI) tags every piece that it read from a rank, wherever in a line the piece was: two ranks that print at once
give "<tag 1>lo<tag 0>loss<tag 1>ss\\n". The decoder takes both.

Pure: no threads; the caller passes in bytes and the time. A line is held back for 0.1 s at most, its beginning for 1 s.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

MPIEXEC = -1  # the "rank" of mpiexec's own messages

_LONGEST_TAG_BYTES = 64


class Tag:
    """The form of a tag: a regular expression in parts. Group 1 is the rank.

    The parts show how the end of a read may cut a tag in two; a single expression cannot show that.
    """

    def __init__(self, *parts: str) -> None:
        self.whole = re.compile("".join(parts).encode())
        beginning = ""
        for part in reversed(parts[:-1]):
            beginning = f"{part}(?:{beginning})?" if beginning else part
        self.beginning = re.compile(rf"(?:{beginning})\Z".encode())


class TagDecoder:
    """Takes the tags out of one of mpiexec's pipes.

    A line that begins without a tag is mpiexec's own and belongs to "rank" `MPIEXEC`.
    """

    def __init__(self, tag: Tag) -> None:
        self._tag = tag
        self._kept = b""  # the end of the last read, if it may begin a tag
        self._rank = MPIEXEC

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Return what was written, by rank and in order; no piece is empty."""
        data = self._kept + data
        # What is kept needs no time limit: no program prints half a tag, and mpiexec completes its own at once.
        cut = self._tag.beginning.search(data, max(0, len(data) - _LONGEST_TAG_BYTES))
        end = cut.start() if cut else len(data)
        self._kept = data[end:]
        position = 0
        for tag in self._tag.whole.finditer(data, 0, end):
            yield from self._untagged(data[position : tag.start()])
            self._rank = int(tag[1])
            position = tag.end()
        yield from self._untagged(data[position:end])

    def close(self) -> Iterator[tuple[int, bytes]]:
        """Return what was kept back; call this at the end of the pipe."""
        kept, self._kept = self._kept, b""
        yield from self._untagged(kept)

    def _untagged(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        line, newline, rest = text.partition(b"\n")
        if line or newline:
            yield self._rank, line + newline
        if newline:
            self._rank = MPIEXEC
        if rest:
            yield MPIEXEC, rest


Stream = Literal["stdout", "stderr"]
Piece = TypeVar("Piece")

# An unfinished line is shown after this time, such as "loading ...". What follows is torn off by a line of another
# rank, and on a busy machine a rank or mpiexec can pause for some 0.1 s in the middle of a line.
PARTIAL_SECONDS = 1.0
MERGE_SECONDS = 0.1  # a line waits this long for the same line from other ranks

# A flood of differing lines is passed on at once: nobody reads it, and searching it takes time.
_MAX_WAITING = 256

_LINE_END = re.compile(rb"\r\n|\n|\r")


class OutputPiece(NamedTuple):
    """A line. An `end` of b"\\r" marks a progress line, b"" the beginning of a line."""

    text: bytes
    end: bytes


class LineCutter:
    """Cuts the bytes of each rank into pieces."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[float, bytes]] = {}  # by rank: start time and text of an unfinished line

    def feed(self, now: float, rank: int, data: bytes) -> Iterator[OutputPiece]:
        """Yield the lines that `data` completes."""
        since, begun = self._begun.pop(rank, (now, b""))
        data = begun + data
        position = 0
        for end in _LINE_END.finditer(data, len(begun)):
            yield OutputPiece(data[position : end.start()], end[0][-1:])
            position, since = end.end(), now
        if position < len(data):
            self._begun[rank] = (since, data[position:])

    def overdue(self, now: float) -> Iterator[tuple[int, OutputPiece]]:
        """Yield, by rank, the lines that have been unfinished for too long; what follows continues them."""
        for rank, (since, text) in list(self._begun.items()):
            if now >= since + PARTIAL_SECONDS:
                del self._begun[rank]
                yield rank, OutputPiece(text, b"")

    @property
    def is_waiting(self) -> bool:
        """True while a line is unfinished."""
        return bool(self._begun)


@dataclass
class _Waiting(Generic[Piece]):
    since: float
    number: int
    piece: Piece
    ranks: set[int] = field(default_factory=set)


class Merger(Generic[Piece]):
    """Joins equal pieces that several ranks write at about the same time. Keeps the order of every rank.

    Pieces leave in the order in which their first rank wrote them. A piece joins an equal one that still waits only if
    the waiting piece came after everything that the rank wrote before.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._queue: deque[_Waiting[Piece]] = deque()
        self._last_number: dict[int, int] = {}  # by rank: the number of its newest piece
        self._next_number = 0

    def feed(self, now: float, rank: int, piece: Piece) -> None:
        """Take in what `rank` wrote."""
        newest = self._last_number.get(rank, -1)
        waiting = next((w for w in self._queue if w.number > newest and w.piece == piece), None)
        if waiting is None or rank == MPIEXEC:
            waiting = _Waiting(now, self._next_number, piece)
            self._next_number += 1
            self._queue.append(waiting)
        waiting.ranks.add(rank)
        self._last_number[rank] = waiting.number

    def ready(self, now: float) -> Iterator[tuple[tuple[int, ...], Piece]]:
        """Yield the pieces to print now, each with the ranks that wrote it, in increasing order."""
        while self._queue:
            first = self._queue[0]
            complete = len(first.ranks) == self._num_ranks or MPIEXEC in first.ranks
            if not complete and now < first.since + MERGE_SECONDS and len(self._queue) <= _MAX_WAITING:
                return
            self._queue.popleft()
            yield tuple(sorted(first.ranks)), first.piece

    @property
    def is_waiting(self) -> bool:
        """True while pieces wait to be printed."""
        return bool(self._queue)
