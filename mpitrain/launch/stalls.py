"""When a job stands still: what its launcher reports, and when the launcher ends the job."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpitrain.launch.placement import Place
from mpitrain.launch.watch import Guards
from mpitrain.watching.hang_report import all_wait_in_one, is_by_design, report
from mpitrain.watching.rank_record import CALLED, WAITS
from mpitrain.watching.view import RankView

# A wait is reported after stall_seconds, then after twice, four times ... that time.
_NEXT = 2.0
_SILENT_SECONDS = 2.5


class Stalls:
    """Judges the waits that the guards report."""

    def __init__(self, places: Sequence[Place], guards: Guards) -> None:
        self._places, self._guards = places, guards
        self._factor = 1.0  # the next report is due at this multiple of stall_seconds
        self._look_again = 0.0  # after a wait by design: do not look before this duration

    def news(self) -> list[str]:
        """Return a report if one is due, one line per entry."""
        longest, is_due = 0.0, False
        for view in self._views():
            longest = max(longest, view.seconds / view.record.stall_seconds)
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
        """Return why the job must be ended if a wait has lasted for hang_seconds; one line per entry.

        In init(), a wait counts from the last rank's call: what a program does before may take any time.
        """
        since_all_called = self._seconds_since_all_called()
        for view in self._views():
            hang_seconds = view.record.hang_seconds
            seconds = min(view.seconds, since_all_called) if view.record.phase == CALLED else view.seconds
            if view.record.status == WAITS and hang_seconds and seconds >= max(hang_seconds, self._look_again):
                seen, lines = self._report(hang_seconds)
                if not is_by_design(seen):
                    return lines
                self._look_again = seconds + view.record.stall_seconds
        return []

    def _seconds_since_all_called(self) -> float:
        """Return how long ago the last rank has called init(); 0.0: not all have."""
        called = self._guards.seen()[0][CALLED]
        if len(called) < sum(place.num_ranks for place in self._places):
            return 0.0
        return time.monotonic() - max(called.values())

    def _views(self) -> list[RankView]:
        lost = self._guards.lost()  # their records stay as they were when they ended
        views = [view for report in self._guards.reports.values() for view in report.ranks.values()]
        return [view for view in views if view.record.rank not in lost]

    def _report(self, hang_seconds: float = 0.0) -> tuple[list[RankView], list[str]]:
        with self._guards.looking:
            silent = self._guards.look_at_ranks()
            seen = [view for host in self._guards.reports.values() for view in host.seen or []]
        lost = self._guards.lost()  # nobody waits for these any more
        views = [view for view in seen if view.record.rank not in lost]
        there = lost | {view.record.rank for view in views}
        absent = {rank: place.host for place in self._places for rank in place.ranks if rank not in there}
        answered = {host for host, report in self._guards.reports.items() if report.seen is not None}
        # A host with a short silence has merely not answered yet.
        silent = {host: seconds for host, seconds in silent.items() if seconds > _SILENT_SECONDS}
        unreachable = {}
        if len(self._guards.reports) > 1 and all_wait_in_one(views, absent):
            self._guards.look()
            reports = self._guards.reports.items()
            unreachable = {host: report.unreachable for host, report in reports if report.processes is not None}
        return views, report(
            views, absent, answered=answered, silent=silent, unreachable=unreachable, hang_seconds=hang_seconds
        )
