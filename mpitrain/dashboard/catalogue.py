"""All runs, from the index and from live jobs, as the pages show them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.dashboard.bell import Bell
from mpitrain.dashboard.index import IndexedRun, RunIndex
from mpitrain.dashboard.records import find_records, is_record, run_id
from mpitrain.dashboard.shown_jobs import ShownJob, ShownJobs
from mpitrain.dashboard.summary import OF_JOB, id_of, job_of, summary_of_job, summary_of_run

_LOOK_SECONDS = 0.5  # at records that grow
_SEARCH_SECONDS = 5.0  # for new records; a long search is repeated less often
_MOST_SHARE = 0.05  # of the time that searches may take
_SUMMARY_SECONDS = 2.0  # states change with time too
_GROWING_SECONDS = 120.0  # a record counts as one that grows until it has not grown for so long


class Catalogue:
    """The runs of a dashboard.

    Attributes:
        bell: rings when a run has changed.
        live: the jobs that go on.
    """

    def __init__(self, index: RunIndex, roots: Sequence[Path]) -> None:
        """`roots` are the folders that are searched for records."""
        self.bell = Bell()
        self.live = ShownJobs(self._ring)
        self._index = index
        self._roots = [root.absolute() for root in roots]
        self._folders: dict[str, Path] = {}  # of all records, by id
        self._of_jobs: set[Path] = set()  # where jobs have said that their records are
        self._growing: dict[Path, float] = {}  # until when
        self._said: set[str] = set()
        self._num_changes = 0  # of the index
        self._indexed: tuple[int, list[IndexedRun]] = (-1, [])
        self._summaries: tuple[int, float, list[dict[str, Any]]] = (-1, 0.0, [])

    async def run(self) -> None:
        """Keep the index as new as the records, and listen to the jobs, until this is cancelled."""
        self._loop = asyncio.get_running_loop()
        self.live.begin()
        try:
            next_search = 0.0
            while True:
                now = time.monotonic()
                try:
                    if now >= next_search:
                        await asyncio.to_thread(self.search)
                        took = time.monotonic() - now
                        next_search = time.monotonic() + max(_SEARCH_SECONDS, took / _MOST_SHARE)
                    else:
                        await asyncio.to_thread(self._follow)
                except Exception as error:  # such as a full disk: the pages show what is known, and it is tried again
                    self._say_once(f"the records cannot be looked at: {error!r}")
                    next_search = time.monotonic() + _SEARCH_SECONDS
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self.live.end()

    def search(self) -> None:
        """Look for new records, and take in what has changed. Called by one thread at a time."""
        self._of_jobs |= {Path(folder) for job in self._jobs() if isinstance(folder := job.look.get("record"), str)}
        of_jobs = [folder for folder in self._of_jobs if is_record(folder)]
        folders = {run_id(folder): folder for folder in (*find_records(self._roots), *of_jobs)}
        is_new = folders.keys() != self._folders.keys()
        self._folders = folders  # before all of them are read: a long record takes a while
        for folder in folders.values():
            self._take_in(folder)
        if is_new:
            self._index.forget_missing()
            self._num_changes += 1
            self._ring()

    def _follow(self) -> None:
        """Take in what is new in records that grow."""
        now = time.monotonic()
        for folder, until in list(self._growing.items()):
            self._take_in(folder)
            if until < now:
                self._growing.pop(folder, None)

    def _take_in(self, folder: Path) -> None:
        try:
            if self._index.update(folder):
                self._num_changes += 1
                self._growing[folder] = time.monotonic() + _GROWING_SECONDS
                self._ring()
        except Exception as error:  # another record may be readable
            self._say_once(f"{folder} cannot be taken in: {error!r}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(f"mpitrain dashboard: {text}", file=sys.stderr, flush=True)

    def _ring(self) -> None:
        with suppress(RuntimeError):  # the dashboard has ended
            self._loop.call_soon_threadsafe(self.bell.ring)

    def _jobs(self) -> list[ShownJob]:
        return list(self.live.jobs.values())

    def summaries(self) -> list[dict[str, Any]]:
        """Return what the list of runs shows: those that go on first, then the youngest first."""
        count, until, known = self._summaries
        if count == self.bell.count and time.monotonic() < until:  # many viewers ask for the same
            return known
        count = self.bell.count
        jobs = self._jobs()
        runs = []
        used: set[int] = set()
        for run in self._runs():
            if run.id in self._folders:
                job = job_of(run, jobs)
                used.add(id(job))
                runs.append(summary_of_run(run, job))
        runs += [summary_of_job(job) for job in jobs if id(job) not in used]
        runs.sort(key=lambda run: (not run["is_live"], -(run["started"] or 0.0)))
        self._summaries = count, time.monotonic() + _SUMMARY_SECONDS, runs
        return runs

    def _runs(self) -> list[IndexedRun]:
        """Return what the index has; it is asked only after a change, because jobs change more often."""
        count, runs = self._indexed
        if count != self._num_changes:
            count = self._num_changes
            runs = self._index.runs()
            self._indexed = count, runs
        return runs

    def find(self, id_: str) -> tuple[IndexedRun | None, ShownJob | None]:
        """Return a run and its job, each as far as it is there."""
        jobs = self._jobs()
        if id_.startswith(OF_JOB):
            return None, next((job for job in jobs if id_of(job) == id_), None)
        run = self._index.run(id_) if id_ in self._folders else None
        return run, None if run is None else job_of(run, jobs)

    def summary(self, run: IndexedRun | None, job: ShownJob | None) -> dict[str, Any]:
        """Return the summary of what `find` has returned; one of both must be there."""
        if run is not None:
            return summary_of_run(run, job)
        assert job is not None
        return summary_of_job(job)

    def series(self, id_: str, name: str) -> tuple[Any, Any]:
        """See RunIndex.series."""
        return self._index.series(id_, name)
