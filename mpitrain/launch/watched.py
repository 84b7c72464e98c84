"""A job as its agents see it, on one host or several: what is wrong with it, who waits for whom, how it ends."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.config import Config, read_config
from mpitrain.context import JobContext
from mpitrain.errors import ConfigError
from mpitrain.launch.connections import typed_on
from mpitrain.launch.ending import words_of_end
from mpitrain.launch.holders import Holders
from mpitrain.launch.live_picture import slow_rank
from mpitrain.launch.orders import Orders
from mpitrain.launch.placement import Place
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.trouble import diagnosis, left_over, misplaced, start_problem
from mpitrain.launch.watch import AttemptOnHosts
from mpitrain.watching.hang_report import all_wait_in_one, as_stacks_show, has_ended, importing, is_by_design
from mpitrain.watching.hang_report import report as report_of_waits
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import CALLED, ENDED, FAILED, STARTED, WAITS
from mpitrain.watching.recorded_calls import report_of_calls
from mpitrain.watching.roll_call import PREFIX
from mpitrain.watching.view import RankView

# A wait is reported after stall_seconds, then after twice, four times ... that time.
_NEXT = 2.0
# Where all programs have finished, a process may take long to end (on a busy machine, with PyTorch). Report it later.
_ENDING = 6.0
_SILENT_SECONDS = 2.5
_HANG_SECONDS = "MPITRAIN_HANG_SECONDS"
# A rank is named that makes the others wait in the mean of so long; the ranks are looked at so often.
_SLOW_SECONDS, _LOOK_SECONDS = 60.0, 1.0


def _config() -> Config:
    """Return the settings of ranks that do not read them."""
    try:
        return read_config(os.environ, {})
    except ConfigError:  # ranks that read them report it
        return Config()


class Stalls:
    """Judges the waits that the agents report."""

    def __init__(self, places: Sequence[Place], attempt: AttemptOnHosts) -> None:
        self._places, self._attempt = places, attempt
        self._factor = 1.0  # the next report is due at this multiple of stall_seconds
        self._importing: dict[
            int, tuple[str, int]
        ] = {}  # the stacks and reads of ranks that imported when hang_seconds were over
        self._config = _config()
        self._look_again = 0.0  # after a wait by design: do not look before this duration

    def news(self) -> list[str]:
        """Return a report if one is due, one line per entry."""
        longest, is_due = 0.0, False
        views = self.views()
        for view in views:
            longest = max(longest, view.seconds / view.record.stall_seconds)
        longest = max(longest, self.idle_seconds() / self._config.stall_seconds)
        if all(view.record.status == ENDED for view in views) and len(views) == self._num_ranks():
            longest /= _ENDING
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
        for view in self.views():
            hang_seconds = view.record.hang_seconds
            seconds = min(view.seconds, since_all_called) if view.record.phase == CALLED else view.seconds
            if view.record.status == WAITS and hang_seconds and seconds >= max(hang_seconds, self._look_again):
                seen, lines = self._report(hang_seconds)
                if not (is_by_design(seen) or self._imports_on(seen)):
                    return lines
                self._look_again = seconds + view.record.stall_seconds
        # A program that knows nothing of mpitrain may wait for what no rank gives, so only the user's limit ends it.
        limit = self._config.hang_seconds if _HANG_SECONDS in os.environ else 0.0
        return self._report(limit)[1] if limit and self.idle_seconds() >= limit else []

    def idle_seconds(self) -> float:
        """Return for how long no rank has used a processor or read anything, of a program that has not called init();
        0.0: one has, or has called it."""
        views = self.views()
        if len(views) < self._num_ranks() or any(view.record.phase not in (STARTED, FAILED) for view in views):
            return 0.0
        return min((view.idle_seconds for view in views if view.ended_seconds is None), default=0.0)

    def _imports_on(self, seen: Sequence[RankView]) -> bool:
        """True if a rank imports, and has come further since this was last asked: a share may be slow."""
        before = self._importing
        self._importing = {view.record.rank: (view.stack, view.reads) for view in seen if importing(view.stack)}
        return any(before.get(rank) != now for rank, now in self._importing.items())

    def _seconds_since_all_called(self) -> float:
        """Return how long ago the last rank has called init(); 0.0: not all have."""
        called = self._attempt.seen()[0][CALLED]
        if len(called) < self._num_ranks():
            return 0.0
        return time.monotonic() - max(called.values())

    def _num_ranks(self) -> int:
        return sum(place.num_ranks for place in self._places)

    def views(self) -> list[RankView]:
        """Return what is known of the ranks that are not lost."""
        lost = self._attempt.lost()  # their records stay as they were when they ended
        views = [view for report in self._attempt.reports.values() for view in report.ranks.values()]
        return [view for view in views if view.record.rank not in lost]

    def _report(self, hang_seconds: float = 0.0) -> tuple[list[RankView], list[str]]:
        with self._attempt.looking:
            silent = self._attempt.look_at_ranks()
            seen = [view for host in self._attempt.reports.values() for view in host.seen or []]
        lost = self._attempt.lost()  # nobody waits for these any more
        views = [as_stacks_show(view) for view in seen if view.record.rank not in lost]
        there = lost | {view.record.rank for view in views}
        absent = {rank: place.host for place in self._places for rank in place.ranks if rank not in there}
        answered = {host for host, report in self._attempt.reports.items() if report.seen is not None}
        if not absent and all(has_ended(view) for view in views):
            self._attempt.look()
            return views, left_over(self._attempt.reports)
        # A host with a short silence has merely not answered yet.
        silent = {host: seconds for host, seconds in silent.items() if seconds > _SILENT_SECONDS}
        unreachable = {}
        if len(self._attempt.reports) > 1 and all_wait_in_one(views, absent):
            self._attempt.look()
            reports = self._attempt.reports.items()
            unreachable = {host: report.unreachable for host, report in reports if report.processes is not None}
        lines = report_of_waits(
            views, absent, answered=answered, silent=silent, unreachable=unreachable, hang_seconds=hang_seconds
        )
        recorded = {view.record.rank: view.recorded for view in views if view.recorded}
        return views, [*lines, *report_of_calls(recorded)]


class SlowRanks:
    """Names a rank that makes the others wait, once each, below the launcher's progress bar and in the log."""

    def __init__(self) -> None:
        self._looks: deque[dict[str, Any]] = deque()
        self._said: set[str] = set()

    def news(self, views: Sequence[RankView], now: float) -> list[str]:
        """Return the sentence about a rank that was not named yet. `now` is of time.monotonic()."""
        if self._looks and now - self._looks[-1]["at"] < _LOOK_SECONDS:
            return []
        ranks = [
            {"rank": view.record.rank, "host": view.host, "phase": "", **view.record.facts, "step": view.record.step}
            for view in views
        ]
        if self._looks and len(ranks) != len(self._looks[-1]["ranks"]):
            self._looks.clear()
        self._looks.append({"at": now, "job": "", "ranks": ranks})
        if now - self._looks[0]["at"] < _SLOW_SECONDS:
            return []
        text = slow_rank(self._looks)
        self._looks.popleft()
        who = text.partition(" is ")[0]
        if not text or who in self._said:
            return []
        self._said.add(who)
        return [text]


class WatchedJob:
    """The job as a Run needs it.

    Attributes:
        path: the roll call.
        attempt: of its hosts.
    """

    def __init__(
        self,
        places: Sequence[Place],
        attempt: AttemptOnHosts,
        path: Path,
        start_seconds: float,
        *,
        recovers: bool = False,
        holders: Holders | None = None,
        orders: Orders | None = None,
    ) -> None:
        """`path` is the roll call; all ranks must register within `start_seconds`, 0: no limit.

        The job `recovers` if the loss of a rank does not end it. `holders` has its warm interpreters, if it is
        started again. `orders` has the commands of users.
        """
        self.path, self.attempt = path, attempt
        self._holders, self._orders = holders, orders
        self._recovers = recovers
        self._places, self._start_seconds = places, start_seconds
        self._stalls = Stalls(places, attempt)
        self._slow = SlowRanks()
        self._since = 0.0
        self._said: set[int] = set()  # the lost ranks that were reported

    def begin(self) -> None:
        """Take note that mpiexec has been started."""
        self._since = time.monotonic()
        self.attempt.start()

    def lead(self) -> None:
        """Take note that the ranks of this job are those that train."""
        if self._orders is not None:
            self.attempt.take_orders(self._orders)

    def news(self) -> list[str]:
        """Return who waits for whom, if nothing has moved for long or a rank is slow, and news of interpreters.

        One line per entry.
        """
        of_holders = [] if self._holders is None else self._holders.news(self._places, self.attempt.records())
        slow = self._slow.news(self._stalls.views(), time.monotonic())
        return [*self._stalls.news(), *slow, *of_holders, *self._news_of_lost()]

    def _news_of_lost(self) -> list[str]:
        """Say how ranks ended without which the others continue."""
        news, reports = [], self.attempt.reports
        for rank in sorted(self.attempt.lost() - self._said):
            self._said.add(rank)
            for host, report in reports.items():
                if (end := report.ends.get(rank)) is not None:
                    news.append(f"rank {rank} on {host} {words_of_end(end)}; the others continue without it")
        return news

    def trouble(self) -> list[str]:
        """Return why the job must be ended now, one line per entry; empty while all is well."""
        if self.attempt.trouble:
            return self.attempt.trouble.splitlines()
        if unable := [f"{host}: {report.unable}" for host, report in self.attempt.reports.items() if report.unable]:
            return unable
        if stray := misplaced(self._places, self.attempt.reports):
            return [stray]
        for host, report in self.attempt.reports.items():
            if lost := report.orphans():
                orphans = f"rank{'s' * (len(lost) > 1)} {rank_ranges(lost)}"
                why = report.kernel(None) or "it was killed, or has crashed"
                return [f"the process of mpiexec on {host} that started {orphans} has gone: {why}"]
        if vanished := self._vanished():
            return [f"{vanished}, and mpiexec continues: the job is ended"]
        when, gone = self.attempt.seen()
        now = time.monotonic()
        read_at = dict(self.attempt.read_at)
        reason = start_problem(
            self._places,
            when,
            gone,
            since=self._since,
            now=now,
            start_seconds=self._start_seconds,
            read_at=read_at,
            idle_seconds=self._stalls.idle_seconds(),
        )
        if reason is None:
            return self._stalls.fatal()
        self.attempt.look()
        return [f"the job has not started: {reason}", *diagnosis(self._places, when, gone, self.attempt.reports)]

    def _vanished(self) -> str:
        """Who ended unseen by mpiexec: the first one, because of whom the others ended, or all, where it is unknown."""
        reports = self.attempt.reports
        lost = {rank: host for host, report in reports.items() for rank in report.vanished(recovers=self._recovers)}
        failed = self.attempt.failed()
        if failed is not None and failed.rank in lost:
            return f"rank {failed.rank} on {lost[failed.rank]} failed"
        for end in self.attempt.first_ends():
            if end.rank in lost:
                return f"rank {end.rank} on {lost[end.rank]} {words_of_end(end)}"
        silent = "ended without a message (os._exit, or killed?)"
        ranks = sorted(lost)
        hosts = " and ".join(dict.fromkeys(lost[rank] for rank in ranks))
        return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)} on {hosts} {silent}" if lost else ""

    def missing(self) -> list[int]:
        """The ranks that began and did not come to their end."""
        return self.attempt.phases.missing(self.attempt.lost())

    def lost(self) -> list[str]:
        """Return the hosts that fell silent."""
        return [host for host, report in self.attempt.reports.items() if report.has_vanished]

    def recorded(self) -> list[str]:
        """Return what the flight recorders of the ranks said at the end: who had not made which call. After `end`."""
        reports = self.attempt.reports.values()
        return report_of_calls({rank: calls for report in reports for rank, calls in report.recorded.items()})

    @property
    def is_gone(self) -> bool:
        """True if somebody removed the roll call on a host."""
        return any(report.is_lost for report in self.attempt.reports.values())

    def end(self, linger_seconds: float) -> tuple[list[str], list[str]]:
        """End the processes that remain on all hosts; return them, and those that could not be ended, a line each."""
        self.attempt.end(linger_seconds)
        left: list[str] = []
        beyond: list[str] = []
        for host, report in self.attempt.reports.items():
            if report.left is None:
                look = typed_on(host, "ps -fu $USER")
                beyond.append(f"{host} has not confirmed that nothing of the job is left; `{look}`")
            left += [f"{host}: {pid} {line}" for pid, line in report.left or []]
            beyond += [f"{host}: process {pid} could not be killed: {line}" for pid, line in report.immortal]
        return left, beyond


def identified(context: JobContext, folder: Path) -> JobContext:
    """Return `context` with what the agents need to know the job: an id, its launcher, its roll call in `folder`."""
    token = secrets.token_hex(4)
    roll_call = str(folder / f"{PREFIX}{token}")
    return replace(context, job=token, launcher=launcher_name(os.getpid()), roll_call=roll_call)
