"""Keeps what this rank did, with begin and end, for a trace."""

from __future__ import annotations

from typing import Any, NamedTuple

# About 100 bytes each here, and 150 in the file. A trace is of some minutes; a run of days would fill the memory.
MOST_SPANS = 200_000


class Span(NamedTuple):
    """One thing that this rank did. `begin` and `end` are values of time.perf_counter() in this process."""

    lane: str  # "compute", "wait" or "wire"
    name: str
    begin: float
    end: float
    about: dict[str, Any]


class Spans:
    """A list of Span that stops growing at MOST_SPANS. All threads may add to it."""

    def __init__(self) -> None:
        self.kept: list[Span] = []
        self.num_left_out = 0

    def add(self, lane: str, name: str, begin: float, end: float, **about: Any) -> None:
        """Keep a span. A trace shows `about` with it."""
        if len(self.kept) < MOST_SPANS:
            self.kept.append(Span(lane, name, begin, end, about))
        else:
            self.num_left_out += 1
