"""Publishes long waits. If no agent watches the job, the ranks report them themselves."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from mpitrain.errors import MpitrainError
from mpitrain.watching.activity import Activity
from mpitrain.watching.hang_report import is_by_design, report
from mpitrain.watching.rank_record import WAITS, RankRecord, read_record
from mpitrain.watching.view import RankView, look_at, process_state, waited

# A wait is published after this time. A shorter wait costs nothing, and could not be read in time anyway.
PUBLISH_SECONDS = 0.1
_LOOK_SECONDS = 0.25
_NEXT = 2.0  # reports come after stall_seconds, then after 2, 4, 8 ... times as long
# Of the ranks that wait on a host, the lowest one reports, even if it began to wait this much later than the others.
_LATER_SECONDS = 1.0


@dataclass(frozen=True)
class Neighbours:
    """The ranks that this process can observe if no agent does: the ranks of its host."""

    where: dict[int, tuple[int, int]]  # by rank: process, and descriptor of its record
    hosts: tuple[str, ...]  # of all ranks

    def look(self, hang_seconds: float = 0.0) -> tuple[list[RankView], list[str]]:
        """Return what these ranks do, and the lines of a report about it."""
        now = time.monotonic()
        views = []
        for rank, (pid, _) in self.where.items():
            record = self._read(rank) or RankRecord(rank, pid=pid)
            views.append(RankView(record, pid, seconds=waited(record, now), host=self.hosts[rank]))
        views = look_at(views)
        absent = {rank: host for rank, host in enumerate(self.hosts) if rank not in self.where}
        unseen = "cannot be seen from here; under `mpitrain run` they can"
        return views, report(views, absent, unseen=unseen, hang_seconds=hang_seconds)

    def reports_instead(self, rank: int, seconds: float) -> bool:
        """True if a lower rank waits about as long, and so will report."""
        for other, (pid, _) in sorted(self.where.items()):
            if other >= rank:
                return False
            record = self._read(other)
            if record is None or record.status != WAITS or process_state(pid) not in ("R", "S"):
                continue
            if waited(record, time.monotonic()) > seconds - _LATER_SECONDS:
                return True
        return False

    def _read(self, rank: int) -> RankRecord | None:
        pid, descriptor = self.where[rank]
        return read_record(f"/proc/{pid}/fd/{descriptor}", rank)


_neighbours: Neighbours | None = None


def watch_over(neighbours: Neighbours) -> None:
    """Make this process report its long waits itself. `init` calls this if no agent watches the job."""
    global _neighbours  # noqa: PLW0603 - a process is one rank
    _neighbours = neighbours


class LongWait:
    """A wait since `started`, by time.monotonic(). Call `look` now and then, and `end` in any case."""

    def __init__(self, activity: Activity, rank: int, doing: object, started: float, status: int = WAITS) -> None:
        self._activity, self._rank, self._doing = activity, rank, doing
        self._words, self._moved, self._status = str(doing), activity.moved, status
        self._since = self._looked = started
        self._factor = 1.0  # of stall_seconds, for the next report
        self._entry = activity.begin(status, self._words, started)

    def look(self, now: float) -> None:
        """Report the wait if a report is due.

        Raises:
            MpitrainError: nothing has moved for hang_seconds, and no agent ends the job.
        """
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        words = str(self._doing)
        if words != self._words:  # a queue runs several pieces of work in turn
            self._activity.end(self._entry)
            self._words, self._entry = words, self._activity.begin(self._status, words, now)
            self._since = now
        if self._activity.moved != self._moved:
            self._moved, self._since = self._activity.moved, now
        if _neighbours is not None:
            self._report(_neighbours, now - self._since)

    def end(self) -> None:
        """The wait is over."""
        self._activity.end(self._entry)

    def _report(self, neighbours: Neighbours, seconds: float) -> None:
        stall_seconds, hang_seconds = self._activity.stall_seconds, self._activity.hang_seconds
        if seconds < stall_seconds:
            self._factor = 1.0
        elif seconds >= stall_seconds * self._factor:
            while stall_seconds * self._factor <= seconds:
                self._factor *= _NEXT
            if not neighbours.reports_instead(self._rank, seconds):
                _, lines = neighbours.look()
                os.write(2, "".join(f"mpitrain: {line}\n" for line in lines).encode(errors="replace"))
        # This rank cannot see what ranks of other hosts do. They may be computing what this rank has to wait for.
        if hang_seconds and seconds >= hang_seconds and len(neighbours.where) == len(neighbours.hosts):
            views, lines = neighbours.look(hang_seconds)
            if not is_by_design(views):
                raise MpitrainError("\n".join(lines))
            self._since += stall_seconds  # look again then
