"""When a job stands still: what its launcher says, and when it ends it."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.launch.activity import WAITS
from mpitrain.launch.hang_report import RankView, is_by_design, report
from mpitrain.launch.placement import Place
from mpitrain.launch.watch import Guards

# A wait is reported after stall_seconds, then after twice, four times ... as long.
_NEXT = 2.0
_SILENT_SECONDS = 2.5


class Stalls:
    """What the guards' beats say of waits."""

    def __init__(self, places: Sequence[Place], guards: Guards) -> None:
        self._places, self._guards = places, guards
        self._factor = 1.0  # of stall_seconds, for the next report
        self._look_again = 0.0  # not before a wait has lasted so long, where one was by design

    def news(self) -> list[str]:
        """A report if one is due, a line each."""
        longest, is_due = 0.0, False
        for _, _, seconds, stall_seconds, _ in self._waits():
            longest = max(longest, seconds / stall_seconds)
        if longest < 1:
            self._factor, self._look_again = 1.0, 0.0
        elif longest >= self._factor:
            is_due = True
        if not is_due:
            return []
        while self._factor <= longest:
            self._factor *= _NEXT
        return self._report()[1]

    def fatal(self) -> list[str]:
        """Why the job must be ended, if a wait has lasted for hang_seconds: a line each."""
        for _, what, seconds, stall_seconds, hang_seconds in self._waits():
            if what == WAITS and hang_seconds and seconds >= max(hang_seconds, self._look_again):
                views, lines = self._report(hang_seconds)
                if not is_by_design(views):
                    return lines
                self._look_again = seconds + stall_seconds
        return []

    def _waits(self) -> list[list[float]]:
        return [wait for report in self._guards.reports.values() for wait in report.waits]

    def _report(self, hang_seconds: float = 0.0) -> tuple[list[RankView], list[str]]:
        silent = self._guards.look_at_ranks()
        views = []
        absent = {rank: place.host for place in self._places for rank in place.ranks}
        for host, its in self._guards.reports.items():
            for rank, *row in its.rows or []:
                views.append(RankView(host, rank, *row))
                absent.pop(rank, None)
        # A host that is silent for a moment has only not answered yet.
        silent = {host: seconds for host, seconds in silent.items() if seconds > _SILENT_SECONDS}
        return views, report(views, absent, silent=silent, hang_seconds=hang_seconds)
