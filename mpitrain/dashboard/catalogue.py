"""All runs, from the index and from live jobs, as the pages show them."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy

from mpitrain.dashboard.folder_watch import FolderWatch
from mpitrain.dashboard.index import IndexedRun, RunIndex
from mpitrain.dashboard.run_notes import RunNotes, write_notes
from mpitrain.dashboard.series import Curve
from mpitrain.dashboard.shown_jobs import ShownJob, ShownJobs
from mpitrain.dashboard.summary import OF_JOB, differences, ids_of, job_of, summary_of_job, summary_of_run
from mpitrain.dashboard.versus import against, is_higher_better, last_run_before


class Bell:
    """Rings in one event loop.

    Attributes:
        count: how often it has rung.
    """

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake all waiting tasks."""
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, count: int, timeout_seconds: float) -> int:
        """Return the new count as soon as it differs from `count`; or the old one, after this time."""
        if self.count == count:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), timeout_seconds)
        return self.count


_LOOK_SECONDS = 0.5  # at the jobs, for folders with records
_CSV_ROWS = 1000  # in a text
_ALL = 1 << 40  # pixels, for every point of a curve
_SUMMARY_SECONDS = 2.0  # states change with time too


class Catalogue:
    """The runs of a dashboard.

    Attributes:
        bell: rings when a run has changed.
        live: the running jobs.
    """

    def __init__(self, index: RunIndex, roots: Sequence[Path]) -> None:
        """`roots` are the folders that are searched for records."""
        self.bell = Bell()
        self.live = ShownJobs(self._ring)
        self._index = index
        self._watches = [self._watch(root.absolute()) for root in roots]
        self._of_jobs: dict[Path, FolderWatch] = {}  # of the folders in which jobs write now
        self._former = self._watch()  # of those in which jobs have written, and that are in no other folder
        self._changes = itertools.count()
        self._num_changes = next(self._changes)  # of the index
        self._indexed: tuple[int, list[IndexedRun]] = (-1, [])
        self._summaries: tuple[int, float, list[dict[str, Any]]] = (-1, 0.0, [])

    def _watch(self, *roots: Path) -> FolderWatch:
        return FolderWatch(self._index, roots, self._note_change)

    async def run(self) -> None:
        """Keep the index as new as the records, and listen to the jobs, until this is cancelled."""
        self._loop = asyncio.get_running_loop()
        self.live.begin()
        for watch in (*self._watches, self._former):
            watch.begin()
        try:
            while True:
                self._look_for_folders()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self.live.end()
            for watch in self._all_watches():
                watch.end()

    def _look_for_folders(self) -> None:
        """Watch the folders in which jobs write, and leave those whose jobs have ended to one thread."""
        written = {Path(folder) for job in self._jobs() if isinstance(folder := job.look.get("record"), str)}
        for folder in written:
            if folder not in self._of_jobs:
                self._of_jobs[folder] = self._watch(folder)
                self._of_jobs[folder].begin()
            if folder in self._former.roots:  # a job writes there again
                self._former.roots.remove(folder)
        for folder, watch in list(self._of_jobs.items()):
            if folder in written or not watch.is_quiet:
                continue
            others = [*self._watches, self._former] if folder in self._former.roots else self._watches
            if any(watch.folders.keys() <= other.folders.keys() for other in others):
                watch.end()
                del self._of_jobs[folder]
            elif folder not in self._former.roots:
                self._former.roots.append(folder)

    def _all_watches(self) -> list[FolderWatch]:
        return [*self._watches, *self._of_jobs.values(), self._former]

    def _folders(self) -> dict[str, Path]:
        """Return the folders of all records, by id; those of the index, where the first search has not ended."""
        watches = self._all_watches()
        folders = {id_: folder for watch in watches for id_, folder in watch.folders.items()}
        if roots := [root for watch in watches if not watch.has_searched for root in watch.roots]:
            for run in self._runs():
                if any(Path(run.folder).is_relative_to(root) for root in roots):
                    folders[run.id] = Path(run.folder)
        return folders

    @property
    def problem(self) -> str:
        """Why something is not shown, or not as it is now; "": all is well."""
        problems = [self.live.problem, *(watch.problem for watch in self._all_watches())]
        return "; ".join(problem for problem in problems if problem)

    def _note_change(self) -> None:
        self._num_changes = next(self._changes)
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # the dashboard has ended
            self._loop.call_soon_threadsafe(self.bell.ring)

    def _jobs(self) -> list[ShownJob]:
        return list(self.live.jobs.values())

    def summaries(self) -> list[dict[str, Any]]:
        """Return what the list of runs shows: those that run first, then the youngest first."""
        count, until, known = self._summaries
        if count == self.bell.count and time.monotonic() < until:  # many viewers ask for the same
            return known
        count = self.bell.count
        jobs = self._jobs()
        runs = []
        used: set[int] = set()
        folders = self._folders()
        for run in self._runs():
            if run.id in folders:
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
        """Return a run and its job; None for either that does not exist."""
        jobs = self._jobs()
        folders = self._folders()
        if not id_.startswith(OF_JOB):
            run = self._index.run(id_) if id_ in folders else None
            return run, None if run is None else job_of(run, jobs)
        # A page that was opened before the record was made: the job has a run by now, also after its end.
        job = next((job for job in jobs if id_ in ids_of(job)), None)
        runs = (run for run in self._runs() if run.id in folders)
        if job is not None:
            return next((run for run in runs if job_of(run, [job])), None), job
        return next((run for run in runs if run.document and OF_JOB + run.document.job == id_), None), None

    def summary(self, run: IndexedRun | None, job: ShownJob | None) -> dict[str, Any]:
        """Return the summary of what `find` has returned; at least one of the two must exist."""
        if run is not None:
            return summary_of_run(run, job)
        assert job is not None
        return summary_of_job(job)

    def curve(self, id_: str, name: str, first: float, last: float, pixels: int, *, is_mean: bool = False) -> Curve:
        """See RunIndex.curve."""
        return self._index.curve(id_, name, first, last, pixels, is_mean=is_mean)

    def csv(self, run: IndexedRun, names: Sequence[str]) -> Iterator[str]:
        """Iterate over all rows of a run as CSV, in texts of many lines. A step that was made again has its last
        value.
        """
        curves = [self._index.curve(run.id, name, -math.inf, math.inf, _ALL) for name in names]
        steps = numpy.unique(numpy.concatenate([numpy.empty(0), *(one.steps for one in curves)]))
        columns = [dict(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for one in curves]

        def line(cells: Sequence[Any]) -> str:
            file = io.StringIO()
            csv.writer(file, lineterminator="\n").writerow(cells)
            return file.getvalue()

        yield line(["step", *names])
        for begin in range(0, len(steps), _CSV_ROWS):
            part = steps[begin : begin + _CSV_ROWS].tolist()
            yield "".join(line([f"{step:.0f}", *(column.get(step, "") for column in columns)]) for step in part)

    def before(self, run: IndexedRun) -> dict[str, Any] | None:
        """Return this run against the last run of its script before it, and what differs; None: there is none."""
        folders = self._folders()
        other = last_run_before(run, (one for one in self._runs() if one.id in folders))
        if other is None:
            return None

        def best_until(id_: str, name: str, step: float) -> float:
            points = self._index.curve(id_, name, -math.inf, step, 1)  # also has the one behind
            finite = [float(value) for value in points.values[points.steps <= step] if math.isfinite(value)]
            return max(finite) if is_higher_better(name) else min(finite)

        now, earlier = summary_of_run(run, None), summary_of_run(other, None)
        return {
            "id": other.id,
            "name": earlier["name"],
            "speeds": [now["speed"], earlier["speed"]],
            "differences": differences([other.document, run.document], [other.folder, run.folder]),
            **against(run, other, best_until),
        }

    def note(self, run: IndexedRun, notes: RunNotes) -> None:
        """Write the notes that a user has made on a run.

        Raises:
            OSError: the file cannot be written.
        """
        write_notes(Path(run.folder), notes)
        self._index.update(Path(run.folder))
        self._note_change()
