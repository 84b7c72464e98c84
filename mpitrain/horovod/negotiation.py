"""The table of the names that ranks have submitted. Rank 0 of a process set keeps it. It sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpitrain.waiting.agreement import mismatch

JOIN = "join"


class Submission(NamedTuple):
    """What one rank has submitted.

    Attributes:
        key: the kind of call and the name, such as allreduce.weight. It matches the calls of the ranks.
        lines: texts that must be equal on all ranks.
        detail: values that may differ and that all ranks need: lengths along the first dimension, splits, or
            StepsMade.code.
        zeros: what a rank that has joined needs to contribute zeros; None: the call cannot have such ranks.
    """

    key: str
    lines: tuple[str, ...]
    detail: tuple[int, ...] = ()
    zeros: tuple[Any, ...] | None = None


class Agreed(NamedTuple):
    """The next action of all ranks: execute a call, or let it fail.

    Attributes:
        key: that of the submissions.
        details: those of the submissions, in rank order; () for a rank that has joined.
        error: why the call fails on all ranks; "": it does not.
        zeros: that of the submissions, if a rank has joined.
    """

    key: str
    details: tuple[tuple[int, ...], ...]
    error: str = ""
    zeros: tuple[Any, ...] | None = None


class Negotiation:
    """The table of one process set."""

    def __init__(self, size: int, name: Callable[[int], str]) -> None:
        """`name` gives the name of a rank in messages."""
        self._size = size
        self._name = name
        self._open: dict[str, dict[int, Submission]] = {}  # by key, in the order of the first submission
        self._joined: list[int] = []  # in the order in which they have joined

    def submit(self, rank: int, submissions: Sequence[Submission]) -> list[Agreed]:
        """Note a rank's submissions. Return what all ranks can do now, in order."""
        agreed: list[Agreed] = []
        for submission in submissions:
            if submission.key == JOIN:
                self._joined.append(rank)
                agreed += [self._settle(key) for key in tuple(self._open) if self._is_complete(key)]
                if len(self._joined) == self._size:
                    # Nothing is open: for each name, every rank has submitted it or has joined.
                    agreed.append(Agreed(JOIN, ((self._joined[-1],),)))
                    self._joined = []
                continue
            self._open.setdefault(submission.key, {})[rank] = submission
            if self._is_complete(submission.key):
                agreed.append(self._settle(submission.key))
        return agreed

    def missing(self, key: str) -> list[int]:
        """Return the ranks that have neither submitted this name nor joined."""
        return [rank for rank in range(self._size) if rank not in self._open.get(key, ()) and rank not in self._joined]

    def _is_complete(self, key: str) -> bool:
        return len(self._open[key].keys() | set(self._joined)) == self._size

    def _settle(self, key: str) -> Agreed:
        submissions = self._open.pop(key)
        ranks = sorted(submissions)
        first = submissions[ranks[0]]
        details = tuple(submissions[rank].detail if rank in submissions else () for rank in range(self._size))
        if any(submissions[rank].lines != first.lines for rank in ranks):
            texts = [[key, *submissions[rank].lines] for rank in ranks]
            return Agreed(key, details, str(mismatch(texts, lambda place: self._name(ranks[place]))))
        absent = [rank for rank in range(self._size) if rank not in submissions]
        if absent and first.zeros is None:
            error = (
                f"{key}: {self._name(absent[0])} has joined, and only allreduce by Average, Sum or Adasum continues "
                "without it; make the call on all ranks before the first of them calls join()"
            )
            return Agreed(key, details, error)
        return Agreed(key, details, zeros=first.zeros if absent else None)
