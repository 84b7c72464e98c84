"""What the agents of a job have said: of their hosts, of the ranks, their ends and failures, by the clock here.

The phase that each rank has reached is known from its records. The exit code of mpiexec does not tell: if a rank leaves
by os._exit(0), MPICH's mpiexec returns 0, and silently ends the ranks that wait for this rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from mpitrain.error_file import is_of_neighbour
from mpitrain.launch.ending import in_order
from mpitrain.launch.log import say
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED, PARTED, PHASES, STARTED, RankRecord
from mpitrain.watching.view import RankView, from_json

# Two clocks drift apart by up to a second a day, so only recent echoes count.
_RECENT_ECHOES = 60


class HostClock:
    """Converts the times of a host's clock to the clock here."""

    def __init__(self) -> None:
        self._echoes: deque[tuple[float, float]] = deque(maxlen=_RECENT_ECHOES)  # the duration; what to add

    @property
    def num_echoes(self) -> int:
        """The number of recent echoes."""
        return len(self._echoes)

    def add(self, sent: float, there: float, heard: float) -> None:
        """Add an echo: when the message was sent and the echo heard, by the clock here, and the host's time between."""
        self._echoes.append((heard - sent, (heard + sent) / 2 - there))

    def here(self, seconds: float) -> float:
        """Convert a time of the host's clock. The fastest echo is the most precise: to half its duration."""
        return seconds + min(self._echoes, default=(0.0, 0.0))[1]


# When a rank's process ends, mpiexec ends the job within milliseconds. Sometimes MPICH's does not, and waits for ever.
_VANISHED_SECONDS = 10.0


@dataclass
class HostReport:
    """What is known of a host while the job runs."""

    ranks: dict[int, RankView] = field(default_factory=dict)  # ranks that have appeared there, as last seen
    ranks_at: float = 0.0  # when the agent has last said what its ranks do, by time.monotonic() here
    load: Mapping[str, Any] | None = None  # how busy the host is, as load.Load says it
    load_at: float = 0.0  # when the agent reported it, by time.monotonic() here
    seen: list[RankView] | None = None  # its ranks with their stacks, on request; None: no answer yet
    first_end: FirstEnd | None = None  # the first end there, of a rank or of a process that started ranks
    ends: dict[int, FirstEnd] = field(default_factory=dict)  # of ranks that were the first to end, also of lost ones
    processes: list[tuple[int, str, str]] | None = None  # id, state, command line
    unreachable: list[str] = field(default_factory=list)  # hosts to which it cannot connect on high ports
    recorded: dict[int, Any] = field(default_factory=dict)  # by rank: what flight_recorder.written_calls had at the end
    unable: str = ""  # why the agent cannot start a rank there
    is_lost: bool = False  # somebody removed the roll call there
    left: list[tuple[int, str]] | None = None  # processes that had to be ended; None: no answer yet
    immortal: list[tuple[int, str]] = field(default_factory=list)
    has_vanished: bool = False  # it fell silent, or its connection has broken
    paths: dict[str, list[str]] | None = None  # what facts.look_at_paths says there, on request; None: no answer yet
    files: list[tuple[str, int]] = field(default_factory=list)  # the job's files there: path and inode
    since: float = 0.0  # when the job began there, by that host's time.time()

    def kernel(self, rank: int | None) -> str:
        """Return what the kernel says of the end of `rank`, or of the ranks' starter (None); "" if it was not first."""
        first = self.first_end
        return first.kernel if first is not None and first.rank == rank else ""

    def take(self, message: Mapping[str, Any]) -> None:
        """Take in a message of the host's agent. AttemptOnHosts handles the ranks and the clock."""
        if "first_end" in message:
            self.first_end = None if message["first_end"] is None else FirstEnd(**message["first_end"])
            if self.first_end is not None and self.first_end.rank is not None:
                self.ends = {**self.ends, self.first_end.rank: self.first_end}
        if "files" in message:
            self.files, self.since = [tuple(file) for file in message["files"]], message["since"]
        self.unable = message.get("unable", self.unable)
        if "paths" in message:
            self.paths = message["paths"]
        if "processes" in message:
            self.processes = [tuple(entry) for entry in message["processes"]]
            self.unreachable = message["unreachable"]
        if "ended" in message:
            self.is_lost = message["lost"]
            self.recorded = dict(message.get("recorded", ()))
            self.immortal = [tuple(entry) for entry in message["immortal"]]
            self.left = [tuple(entry) for entry in message["ended"]]

    def orphans(self) -> list[int]:
        """Return the ranks that live on although their starter, a daemon of mpiexec, has ended."""
        return [rank for rank, view in sorted(self.ranks.items()) if view.is_orphan]

    def vanished(self, *, recovers: bool = False) -> list[int]:
        """Return the ranks that ended before their time, unseen by mpiexec: before the programs of all ranks had.

        If the job `recovers`, a rank that a signal ended after init() does not count: the others continue without it,
        as soon as each of them has come to its next call. Open MPI does not tell them of one that left by os._exit.
        """
        phases = (CALLED, FAILED) if recovers else (CALLED, BEGUN, DONE, FAILED)
        left = {rank for rank, end in self.ends.items() if (end.code or 0) > 0}
        return [
            rank
            for rank, view in sorted(self.ranks.items())
            if view.ended_seconds is not None
            and view.ended_seconds > _VANISHED_SECONDS
            and (view.record.phase in phases or (rank in left and view.record.phase == BEGUN))
        ]


class Phases:
    """The phases that ranks have reached.

    Attributes:
        when: by phase, then by rank, the time at which this was first seen. A rank that has reached a phase has also
            reached the phases before it. A failure is an exception: it implies no earlier phase.
    """

    def __init__(self) -> None:
        self.when: dict[str, dict[int, float]] = {phase: {} for phase in PHASES}

    def add(self, record: RankRecord, now: float) -> None:
        """Take in the record of a rank."""
        passed = [FAILED] if record.phase == FAILED else PHASES[: PHASES.index(record.phase) + 1]
        for phase in passed:
            self.when[phase].setdefault(record.rank, now)

    def missing(self, lost: Set[int]) -> list[int]:
        """Return the ranks that have begun and have not finished, in increasing order, but for the `lost` ones.

        If all have finished, return those that have ended while they waited for the others.
        """
        done = self.when[DONE].keys()
        return sorted(self.when[BEGUN].keys() - done - lost or done - self.when[PARTED].keys() - lost)


class Said:
    """AttemptOnHosts (watch.py) adds to this in its thread, and the main thread reads.

    Attributes:
        reports: the report of each host.
        phases: the phases of all ranks, with the time at which each was seen.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self.reports = {host: HostReport() for host in hosts}
        self.phases = Phases()
        self.read_at: dict[int, float] = {}  # by rank: when it was last seen to have read files, before init()
        self._clocks = {host: HostClock() for host in self.reports}
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
        """The ranks that were lost, and without which the others continue."""
        return {rank for record in self.records().values() for rank in record.lost}

    def failed(self) -> RankRecord | None:
        """Return the record of the rank that failed first; its time is by the clock here. None: no rank has failed.

        A rank whose neighbour has gone is not the first, even if the neighbour says later why.
        """
        with self._lock:
            failed = [
                replace(view.record, failed_seconds=self._here(host, view.record.failed_seconds))
                for host, report in self.reports.items()
                for view in report.ranks.values()
                if view.record.phase == FAILED
            ]
        return min(
            failed,
            key=lambda record: (is_of_neighbour(record.error), record.failed_seconds, record.rank),
            default=None,
        )

    def tracebacks(self) -> dict[int, str]:
        """Return what the error files of ranks have, by rank."""
        views = [view for report in self.reports.values() for view in report.ranks.values()]
        return {view.record.rank: view.traceback for view in views if view.traceback}

    def left_early(self) -> list[int]:
        """Return the ranks that never called init(), and have left with code 0."""
        views = [view for report in self.reports.values() for view in report.ranks.values()]
        return sorted(view.record.rank for view in views if view.record.phase == STARTED and view.code == 0)

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

    def _here(self, host: str, seconds: float) -> float:
        """Convert a time of that host's clock to the clock here."""
        return self._clocks[host].here(seconds)

    def take(self, host: str, message: dict[str, Any], heard: float, now: float) -> None:
        """Take in a message of the agent of `host`, which was heard at that time."""
        with self._lock:
            report = self.reports.get(host)
            if report is not None:
                self._take(report, host, message, heard, now)

    def _take(self, report: HostReport, host: str, message: dict[str, Any], heard: float, now: float) -> None:
        if "facts" in message or "error" in message:
            self._facts[host] = message.get("facts", message)
        views = [from_json(fields, host) for fields in message.get("ranks", [])]
        for view in views:
            self.phases.add(view.record, now)
            before = report.ranks.get(view.record.rank)
            if before is not None and view.reads > before.reads:
                self.read_at[view.record.rank] = now
        # A new object each time: the main thread may be iterating over the one before.
        report.ranks = {**report.ranks, **{view.record.rank: view for view in views}}
        if "ranks" in message:
            report.ranks_at = heard
        if "load" in message:
            report.load, report.load_at = message["load"], heard
        if "no_load" in message:
            why = message["no_load"]
            say(f"{host}: how busy this host is cannot be read ({why}), so it is not shown; the job continues")
        if "seen" in message:
            report.seen = [from_json(fields, host) for fields in message["seen"]]
        report.take(message)
        if "unreachable" in message:  # an attempt that was prepared (attempts.py) tests also hosts lost since
            report.unreachable = [peer for peer in report.unreachable if peer in self.reports]
