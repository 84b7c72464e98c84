"""What the guards of a job have said: the ranks, their ends and failures, by the clock of the launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mpitrain.launch.ending import in_order
from mpitrain.launch.events import say
from mpitrain.launch.host_clock import HostClock
from mpitrain.launch.host_report import HostReport
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.phases import Phases
from mpitrain.watching.rank_record import FAILED, RankRecord
from mpitrain.watching.view import from_json


class Said:
    """Guards (watch.py) adds to this in its thread, and the main thread reads.

    Attributes:
        reports: the report of each host.
        phases: the phases of all ranks, with the time at which each was seen.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self.reports = {host: HostReport() for host in hosts}
        self.phases = Phases()
        self._clocks = {host: HostClock() for host in self.reports}
        self._answered = dict.fromkeys(self.reports, 0.0)  # when each guard last answered a beat
        self._facts: dict[str, Any] = {}
        self._lock = threading.Lock()

    def seen(self) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
        """Return who reached which phase when, and when ranks went; copies, because the thread adds to both."""
        now = time.monotonic()
        with self._lock:
            when = {phase: dict(ranks) for phase, ranks in self.phases.when.items()}
            gone = {
                rank: now - view.ended_seconds
                for report in self.reports.values()
                for rank, view in report.ranks.items()
                if view.ended_seconds is not None
            }
            return when, gone

    def first_ends(self) -> list[FirstEnd]:
        """What ended first on each host where that is known; the first of all first."""
        lost = self.lost()
        with self._lock:
            ends = {
                host: report.first_end
                for host, report in self.reports.items()
                if report.first_end is not None and report.first_end.rank not in lost
            }
            here = [replace(end, seconds=self._here(host, end.seconds)) for host, end in ends.items()]
        return in_order(here)

    def records(self) -> dict[int, RankRecord]:
        """Return the last record of each rank."""
        with self._lock:
            return {rank: view.record for report in self.reports.values() for rank, view in report.ranks.items()}

    def lost(self) -> set[int]:
        """The ranks that were lost, and without which the others go on."""
        return {rank for record in self.records().values() for rank in record.lost}

    def failed(self) -> RankRecord | None:
        """Return the record of the rank that failed first; its time is by the clock here. None: no rank has failed."""
        with self._lock:
            failed = [
                replace(view.record, failed_seconds=self._here(host, view.record.failed_seconds))
                for host, report in self.reports.items()
                for view in report.ranks.values()
                if view.record.phase == FAILED
            ]
        return min(failed, key=lambda record: (record.failed_seconds, record.rank), default=None)

    def left(self) -> tuple[int, float] | None:
        """The step after which all ranks have ended for a change of hosts, and when, by the clock here; else None."""
        lost = self.lost()
        with self._lock:
            left = [
                (view.record.left_step, self._here(host, view.record.left_seconds))
                for host, report in self.reports.items()
                for view in report.ranks.values()
                if view.record.rank not in lost
            ]
        return min(left) if left and all(step for step, _ in left) else None

    def num_echoes(self, host: str) -> int:
        """The number of recent echoes of that host."""
        return self._clocks[host].num_echoes

    def _here(self, host: str, seconds: float) -> float:
        """Convert a time of that host's clock to the clock here."""
        return self._clocks[host].here(seconds)

    def take(self, host: str, message: dict[str, Any], heard: float, now: float) -> None:
        """Take in a message of the guard of `host`, which was heard at that time. Call this with the lock."""
        report = self.reports[host]
        if "facts" in message or "error" in message:
            self._facts[host] = message.get("facts", message)
        views = [from_json(fields, host) for fields in message.get("ranks", [])]
        for view in views:
            self.phases.add(view.record, now)
        # A new object each time: the main thread may be iterating over the one before.
        report.ranks = {**report.ranks, **{view.record.rank: view for view in views}}
        if "ranks" in message:
            report.ranks_at = heard
        if "load" in message:
            report.load, report.load_at = message["load"], heard
        if "no_load" in message:
            why = message["no_load"]
            say(f"{host}: how busy this host is cannot be read ({why}), so it is not shown; the job goes on")
        if "echo" in message:
            self._answered[host] = heard
            self._clocks[host].add(message["echo"], message["time"], heard)
        if "seen" in message:
            report.seen = [from_json(fields, host) for fields in message["seen"]]
        report.take(message)
        if "unreachable" in message:  # a guard that was prepared for a try (tries.py) tests also hosts lost since
            report.unreachable = [peer for peer in report.unreachable if peer in self.reports]
