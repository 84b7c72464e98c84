"""Which rank wrote what: the tags that mpiexec puts into its single pipe, and how they are taken out again.

Open MPI tags whole lines. Hydra (MPICH, Intel MPI) tags every piece that it read from a rank, wherever in a line the
piece was: two ranks that print at once give "<tag 1>lo<tag 0>loss<tag 1>ss\\n". The decoder takes both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
