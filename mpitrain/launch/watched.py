"""A job as its guards see it, on one host or several: what is wrong with it, who waits for whom, how it ends."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mpitrain.job.context import JobContext
from mpitrain.launch.arrival import diagnosis, misplaced, problem
from mpitrain.launch.connections import typed_on
from mpitrain.launch.orders import Orders
from mpitrain.launch.placement import Place
from mpitrain.launch.reserve import Reserve
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.stalls import Stalls
from mpitrain.launch.watch import Guards
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import RankRecord
from mpitrain.watching.roll_call import PREFIX


class WatchedJob:
    """The job as run_job needs it."""

    def __init__(
        self,
        places: Sequence[Place],
        guards: Guards,
        path: Path,
        start_seconds: float,
        *,
        recovers: bool = False,
        reserve: Reserve | None = None,
        orders: Orders | None = None,
    ) -> None:
        """`path` is the roll call; all ranks must register within `start_seconds`, 0: no limit.

        The job `recovers` if the loss of a rank does not end it. `reserve` has its spares, if it has any. `orders` has
        what tellers tell it.
        """
        self.path = path
        self._reserve, self._orders = reserve, orders
        self._recovers = recovers
        self._places, self._guards, self._start_seconds = places, guards, start_seconds
        self._stalls = Stalls(places, guards)
        self._since = 0.0

    def begin(self) -> None:
        """Take note that mpiexec has been started."""
        self._since = time.monotonic()
        self._guards.start()

    def lead(self) -> None:
        """Take note that the ranks of this job are those that train."""
        if self._orders is not None:
            self._guards.take_orders(self._orders)

    def news(self) -> list[str]:
        """Return who waits for whom, if nothing has moved for long, and news of the spares; one line per entry."""
        of_spares = [] if self._reserve is None else self._reserve.news(self._places, self._guards.records())
        return [*self._stalls.news(), *of_spares]

    def trouble(self) -> list[str]:
        """Return why the job must be ended now, one line per entry; empty while all is well."""
        if self._guards.trouble:
            return self._guards.trouble.splitlines()
        if stray := misplaced(self._places, self._guards.reports):
            return [stray]
        for host, report in self._guards.reports.items():
            if lost := report.orphans():
                orphans = f"rank{'s' * (len(lost) > 1)} {rank_ranges(lost)}"
                why = report.kernel(None) or "it was killed, or has crashed"
                return [f"the process of mpiexec on {host} that started {orphans} has gone: {why}"]
        if vanished := self._vanished():
            return [f"{vanished}, and mpiexec goes on: the job is ended"]
        when, gone = self._guards.seen()
        now = time.monotonic()
        reason = problem(self._places, when, gone, since=self._since, now=now, start_seconds=self._start_seconds)
        if reason is None:
            return self._stalls.fatal()
        self._guards.look()
        return [f"the job has not started: {reason}", *diagnosis(self._places, when, gone, self._guards.reports)]

    def _vanished(self) -> str:
        """Who ended unseen by mpiexec: the first one, because of whom the others ended, or all, where it is unknown."""
        reports = self._guards.reports
        lost = {rank: host for host, report in reports.items() for rank in report.vanished(recovers=self._recovers)}
        failed = self._guards.failed()
        if failed is not None and failed.rank in lost:
            return f"rank {failed.rank} on {lost[failed.rank]} failed"
        silent = "ended without a word (os._exit, or killed?)"
        for end in self._guards.first_ends():
            if end.rank in lost:
                return f"rank {end.rank} on {lost[end.rank]} {f'ended: {end.kernel}' if end.kernel else silent}"
        ranks = sorted(lost)
        hosts = " and ".join(dict.fromkeys(lost[rank] for rank in ranks))
        return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)} on {hosts} {silent}" if lost else ""

    def missing(self) -> list[int]:
        """The ranks that began and did not come to their end."""
        return self._guards.phases.missing(self._guards.lost())

    def lost(self) -> list[str]:
        """Return the hosts that fell silent."""
        return [host for host, report in self._guards.reports.items() if report.has_vanished]

    def first_ends(self) -> list[FirstEnd]:
        """Return the first end on each host, if known, in order of time."""
        return self._guards.first_ends()

    def records(self) -> dict[int, RankRecord]:
        """Return the last record of each rank."""
        return self._guards.records()

    def failed(self) -> RankRecord | None:
        """Return the record of the rank that failed first; None: no rank has failed."""
        return self._guards.failed()

    def left(self) -> tuple[int, float] | None:
        """Return the step after which all ranks have left for other hosts, and when; None: they have not."""
        return self._guards.left()

    def interrupt(self) -> None:
        """Take note that a signal to the launcher ends the job."""
        self._guards.interrupt()

    @property
    def is_gone(self) -> bool:
        """True if somebody removed the roll call on a host."""
        return any(report.is_lost for report in self._guards.reports.values())

    def end(self, linger_seconds: float) -> tuple[list[str], list[str]]:
        """End what is left on all hosts; return what that was, and what could not be ended or asked, one line each."""
        self._guards.end(linger_seconds)
        left: list[str] = []
        beyond: list[str] = []
        for host, report in self._guards.reports.items():
            if report.left is None:
                look = typed_on(host, "ps -fu $USER")
                beyond.append(f"{host} has not confirmed that nothing of the job is left; `{look}`")
            left += [f"{host}: {pid} {line}" for pid, line in report.left or []]
            beyond += [f"{host}: process {pid} could not be killed: {line}" for pid, line in report.immortal]
        return left, beyond


def identified(context: JobContext, folder: Path) -> JobContext:
    """Return `context` with what the guards need to know the job: an id, its launcher, its roll call in `folder`."""
    token = secrets.token_hex(4)
    roll_call = str(folder / f"{PREFIX}{token}")
    return replace(context, job=token, launcher=launcher_name(os.getpid()), roll_call=roll_call)
