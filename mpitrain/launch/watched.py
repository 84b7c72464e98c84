"""A job as its guards see it, on this host or on several: what is wrong with it, who waits for whom, how it ends."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpitrain.launch.arrival import diagnosis, misplaced, problem
from mpitrain.launch.guard import LAUNCHER, MARK
from mpitrain.launch.output import rank_ranges
from mpitrain.launch.placement import Place
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.stalls import Stalls
from mpitrain.launch.steps import Report
from mpitrain.launch.watch import Guards


class WatchedJob:
    """What run_job needs to know of it."""

    def __init__(self, places: Sequence[Place], guards: Guards, path: Path, start_seconds: float) -> None:
        """`path` of the roll call; all ranks must be there within `start_seconds`, 0: no limit."""
        self.path = path
        self._places, self._guards, self._start_seconds = places, guards, start_seconds
        self._stalls = Stalls(places, guards)
        self._since = 0.0

    def begin(self) -> None:
        """mpiexec has been started."""
        self._since = time.monotonic()
        self._guards.start()

    def news(self) -> list[str]:
        """Who waits for whom, when nothing has moved for long: a line each."""
        return self._stalls.news()

    def trouble(self) -> list[str]:
        """Why the job must be ended now, a line each; nothing while all is well."""
        if self._guards.trouble:
            return self._guards.trouble.splitlines()
        if stray := misplaced(self._places, self._guards.reports):
            return [stray]
        for host, report in self._guards.reports.items():
            if report.orphans:
                orphans = f"rank{'s' * (len(report.orphans) > 1)} {rank_ranges(report.orphans)}"
                why = "killed by somebody, or for want of memory (`sudo dmesg | grep -i oom` there)"
                return [f"the process of mpiexec on {host} that started {orphans} has gone: {why}"]
            if report.vanished:
                vanished = f"rank{'s' * (len(report.vanished) > 1)} {rank_ranges(report.vanished)} on {host}"
                how = "did not come to the end and did not say why (os._exit, or killed?)"
                return [f"{vanished} {how}, and mpiexec goes on: the job is ended"]
        when, gone = self._guards.seen()
        now = time.monotonic()
        found = problem(self._places, when, gone, since=self._since, now=now, start_seconds=self._start_seconds)
        if found is None:
            return self._stalls.fatal()
        self._guards.look()
        return [f"the job has not started: {found}", *diagnosis(self._places, when, gone, self._guards.reports)]

    def missing(self) -> list[int]:
        """The ranks that began and did not come to their end."""
        return self._guards.signatures.missing()

    def lost(self) -> list[str]:
        """The hosts that vanished."""
        return [host for host, report in self._guards.reports.items() if report.has_vanished]

    def first_dead(self) -> list[int]:
        """The rank that died first on each host where that is known; the first of all first."""
        return self._guards.first_dead()

    def steps(self) -> dict[int, Report]:
        """What each rank has said of its steps."""
        return {rank: said for report in self._guards.reports.values() for rank, said in report.steps.items()}

    @property
    def is_gone(self) -> bool:
        """True when somebody has removed the roll call on a host."""
        return any(report.is_lost for report in self._guards.reports.values())

    def end(self, linger_seconds: float) -> tuple[list[str], list[str]]:
        """End what is left on all hosts: what that was, and what could not be ended or asked, a line each."""
        self._guards.end(linger_seconds)
        left: list[str] = []
        beyond: list[str] = []
        for host, report in self._guards.reports.items():
            if report.left is None:
                beyond.append(f"{host} has not said that nothing of the job is left there; `ssh {host} ps -fu $USER`")
            left += [f"{host}: {pid} {line}" for pid, line in report.left or []]
            beyond += [f"{host}: process {pid} could not be killed: {line}" for pid, line in report.immortal]
        return left, beyond


@contextmanager
def watched_here(num_ranks: int) -> Iterator[tuple[WatchedJob, Mapping[str, str]]]:
    """A job of so many ranks on this machine alone, and what its processes must have in their environment."""
    host = socket.gethostname()
    token = new_token()
    path = Path(tempfile.gettempdir()) / f"mpitrain-roll-call-{token}"
    # Without a limit of silence: a launcher that is stopped (Ctrl-Z) stops the reports, not the job.
    wish = {"token": token, "roll_call": str(path), "peers": {}, "silence_seconds": 0}
    with Guards(host, [host], {host: wish}) as guards:
        guards.facts()
        place = Place(host=host, first_rank=0, num_ranks=num_ranks)
        yield WatchedJob([place], guards, path, start_seconds=0.0), marks(token)


def marks(token: str) -> dict[str, str]:
    """What every process of a job has in its environment."""
    return {MARK: token, LAUNCHER: launcher_name(os.getpid())}


def new_token() -> str:
    """A job's id: what `mpitrain ps` shows."""
    return secrets.token_hex(4)
