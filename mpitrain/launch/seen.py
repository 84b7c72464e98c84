"""A job as its guards see it, on all its hosts: what the process that runs mpiexec asks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import RankRecord


class SeenJob(Protocol):
    """See watched.WatchedJob."""

    path: Path  # of the roll call

    @property
    def is_gone(self) -> bool:
        """True if somebody removed the roll call."""

    def begin(self) -> None:
        """Take note that mpiexec has been started."""

    def lead(self) -> None:
        """Take note that the ranks of this job are those that train: no try before this one does any more."""

    def news(self) -> list[str]:
        """Return what to tell the user now, one line per entry."""

    def trouble(self) -> list[str]:
        """Return why the job must be ended now, one line per entry."""

    def missing(self) -> list[int]:
        """Return the ranks that began and did not finish."""

    def lost(self) -> list[str]:
        """Return the hosts that fell silent."""

    def first_ends(self) -> list[FirstEnd]:
        """Return the first end on each host, if known, in order of time."""

    def records(self) -> dict[int, RankRecord]:
        """Return the last record of each rank."""

    def failed(self) -> RankRecord | None:
        """Return the record of the rank that failed first; None: no rank has failed."""

    def left(self) -> tuple[int, float] | None:
        """Return the step after which all ranks have left for other hosts, and when; None: they have not."""

    def interrupt(self) -> None:
        """Take note that a signal to the launcher ends the job."""

    def end(self, linger_seconds: float) -> tuple[list[str], list[str]]:
        """End what is left on all hosts; return what that was, and what could not be ended, one line per entry."""
