"""The queue of jobs: which samples of which epoch are free, at a worker, or answered and not used yet.

    order of an epoch  |  used  | job 7: worker b | used | free | job 9: held |   not cut yet   |
                       0                                                    cursor

Every sample is in one place. A checkpoint keeps the cursor, and all before the cursor that is not used.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

# Epoch, begin and end (exclusive) in the order of the epoch.
Places: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class ServedJob:
    """Some samples for one worker to compute a gradient of.

    Attributes:
        number: of this life of the server. No two jobs have the same, also not two for the same samples.
        epoch, begin, end: the places of the samples in the order of an epoch; `end` is exclusive.
        worker: who has the job; None: nobody.
        is_answered: the worker has sent the gradient.
    """

    number: int
    epoch: int
    begin: int
    end: int
    worker: Hashable | None = None
    is_answered: bool = False

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.end - self.begin

    @property
    def places(self) -> Places:
        """Epoch, begin and end."""
        return self.epoch, self.begin, self.end


class JobQueue:
    """Cuts an endless row of epochs into jobs. Each sample of an epoch is used once, whoever fails to use it.

    Samples that come back go out first. The queue knows neither sockets nor clocks, and does not wait.

    Attributes:
        epoch, cursor: where the row is not cut yet.
    """

    def __init__(self, num_samples: int, epoch: int = 0, cursor: int = 0, left: Iterable[Sequence[int]] = ()) -> None:
        """
        Args:
            num_samples: of an epoch; at least 1.
            epoch, cursor: where to begin.
            left: places before that, which are not used; none of them twice.
        """
        self.epoch, self.cursor = epoch, cursor
        self._num_samples = num_samples
        self._free: list[Places] = _merged((epoch, begin, end) for epoch, begin, end in left)
        self._jobs: dict[int, ServedJob] = {}
        self._number = 0

    def cut(self, most: int, passed_over: Container[Places] = ()) -> ServedJob:
        """Return a new job of at most `most` samples, which no worker has yet. All its samples are of one epoch.

        It has fewer samples at the end of an epoch, and where fewer in a row have come back. Samples that came back as
        a job of `passed_over` stay.
        """
        index = next((index for index, places in enumerate(self._free) if places not in passed_over), None)
        if index is not None:
            epoch, begin, last = self._free.pop(index)
            end = min(begin + most, last)
            if end < last:
                self._free.insert(index, (epoch, end, last))
        else:
            if self.cursor == self._num_samples:
                self.epoch, self.cursor = self.epoch + 1, 0
            epoch, begin = self.epoch, self.cursor
            end = self.cursor = min(begin + most, self._num_samples)
        return self._add(epoch, begin, end)

    def split(self, number: int, parts: int) -> list[ServedJob]:
        """Replace a job by so many jobs of about equal size, at least one sample each. Return them in order."""
        job = self._jobs.pop(number)
        parts = min(parts, job.samples)
        bounds = [job.begin + part * job.samples // parts for part in range(parts + 1)]
        return [self._add(job.epoch, begin, end) for begin, end in pairwise(bounds)]

    def assign(self, number: int, worker: Hashable) -> ServedJob:
        """Give a job to a worker."""
        self._jobs[number] = job = replace(self._jobs[number], worker=worker)
        return job

    def find(self, number: int, worker: Hashable) -> ServedJob | None:
        """Return a job that a worker has not answered. None: the worker does not have this job, or has answered it."""
        job = self._jobs.get(number)
        return None if job is None or job.worker != worker or job.is_answered else job

    def answer(self, number: int, worker: Hashable) -> ServedJob | None:
        """Take in that a worker has sent its gradient. None as for `find`."""
        job = self.find(number, worker)
        if job is not None:
            self._jobs[number] = job = replace(job, is_answered=True)
        return job

    def renew(self, number: int) -> ServedJob:
        """Take a job away from its worker. Return one for the same samples, which no worker has."""
        return self._add(*self._jobs.pop(number).places)

    def give_back(self, number: int) -> None:
        """Let the samples of a job go out again, before others."""
        insort(self._free, self._jobs.pop(number).places)

    def use(self, number: int) -> None:
        """Take in that an update was made from the gradient of a job."""
        del self._jobs[number]

    def at(self, worker: Hashable) -> list[ServedJob]:
        """Return the jobs that a worker has and has not answered."""
        return [job for job in self._jobs.values() if job.worker == worker and not job.is_answered]

    def out(self) -> dict[Hashable, ServedJob]:
        """Return the jobs that are not answered, by the workers that have them. A worker has one at most."""
        return {job.worker: job for job in self._jobs.values() if job.worker is not None and not job.is_answered}

    def position(self) -> dict[str, Any]:
        """Return where to go on if all jobs are lost: epoch, cursor, and `left`, the places before that to be used.

        Where no job is out of order, the position is that of one process that has used the same samples.
        """
        left = _merged([*self._free, *(job.places for job in self._jobs.values())])
        epoch, cursor = self.epoch, self.cursor
        while left and left[-1][::2] == (epoch, cursor):
            epoch, cursor, _ = left.pop()
            if cursor == 0 and epoch > 0:
                epoch, cursor = epoch - 1, self._num_samples
        return {"epoch": epoch, "cursor": cursor, "left": [list(places) for places in left]}

    @property
    def numbers(self) -> tuple[int, list[int]]:
        """The newest number, and those up to it whose jobs are not used yet."""
        return self._number, list(self._jobs)

    def workers(self) -> set[Hashable]:
        """Return those that have a job and have not answered it."""
        return {job.worker for job in self._jobs.values() if job.worker is not None and not job.is_answered}

    def summary(self) -> dict[str, int]:
        """Return numbers of jobs and samples. `left`: samples of the epoch, and of those before, that no worker has."""
        jobs = self._jobs.values()
        waiting = sum(end - begin for _, begin, end in self._free)
        waiting += sum(job.samples for job in jobs if job.worker is None)
        return {
            "epoch": self.epoch,
            "samples": self._num_samples,
            "left": self._num_samples - self.cursor + waiting,
            "out": sum(job.worker is not None and not job.is_answered for job in jobs),
            "answered": sum(job.is_answered for job in jobs),
        }

    def _add(self, epoch: int, begin: int, end: int) -> ServedJob:
        self._number += 1
        self._jobs[self._number] = job = ServedJob(self._number, epoch, begin, end)
        return job


def _merged(places: Iterable[Places]) -> list[Places]:
    """Return the places in order, neighbours as one."""
    merged: list[Places] = []
    for epoch, begin, end in sorted(places):
        if merged and merged[-1][0] == epoch and merged[-1][2] == begin:
            merged[-1] = (epoch, merged[-1][1], end)
        else:
            merged.append((epoch, begin, end))
    return merged
