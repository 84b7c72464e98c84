"""Who may get a job now, and which gradients make an update: one class for each mode of a ParameterServer.

A pace knows neither sockets nor clocks. It sees a worker join, ask, answer and go, in the order in which the server
does, and owns all jobs of its queue.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from mpitrain.serve.jobs import JobQueue, Places, ServedJob


class JobPace(Protocol):
    """The rule of a mode."""

    def join(self, worker: Hashable) -> None:
        """Take in a worker. It has no job yet."""
        ...

    def leave(self, worker: Hashable) -> None:
        """Take back the jobs of a worker that is gone, so that others get them. Answers that have come stay."""
        ...

    def next_job(self, worker: Hashable) -> ServedJob | None:
        """Return a job for a worker that has none. None: the worker waits."""
        ...

    def refuse(self, job: ServedJob) -> None:
        """Take back a job whose answer cannot be used."""
        ...

    def answer(self, job: ServedJob) -> Sequence[ServedJob] | None:
        """Take in that a job of the queue was answered.

        Return the jobs whose gradients make an update now, in the order in which they are added up. None: there is no
        update yet.
        """
        ...


class Failures:
    """Which workers could not compute which samples. Such samples go to a worker that has not tried them, if any.

    Attributes:
        workers: those that are here.
    """

    def __init__(self) -> None:
        self.workers: set[Hashable] = set()
        self._of: dict[Places, set[Hashable]] = {}

    def add(self, job: ServedJob) -> None:
        """Take in that the worker of a job has failed."""
        self._of.setdefault(job.places, set()).add(job.worker)

    def drop(self, job: ServedJob) -> None:
        """Take in that a worker has computed a job."""
        self._of.pop(job.places, None)

    def not_for(self, worker: Hashable) -> set[Places]:
        """Return the places that this worker leaves to others."""
        return {places for places, failed in self._of.items() if worker in failed and self.workers - failed}


class Lockstep:
    """sync: the gradients of one step, all computed with the same parameters, make one update.

    The samples of a step are those of the step that one process would make. They are cut into as many jobs as there are
    workers when the step begins, or into jobs of `job_samples`. Gradients are added up in the order of the samples, so
    the result does not depend on the order in which they arrive.

    With `backup` = b and n + b workers, n + b jobs of `batch` / n samples go out, the first n answers make the update,
    and the samples of the others go out again. Where n does not divide the batch, `batch` mod n of the jobs have one
    sample more, so that no n answers have more samples than the batch. A worker that has answered gets another job of
    the step only if fewer than n jobs are at workers or answered. Source: Chen et al., Revisiting Distributed
    Synchronous SGD, arXiv 1604.00981 (2016).
    """

    def __init__(self, queue: JobQueue, batch: int, job_samples: int | None, backup: int) -> None:
        self._queue, self._batch = queue, batch
        self._job_samples, self._backup = job_samples, backup
        self._failures = Failures()
        self._step: list[ServedJob] = []  # in the order of the samples; assigned jobs as they were assigned
        self._needed = 0

    def join(self, worker: Hashable) -> None:
        """See JobPace. The worker takes part from the next step on, or takes a job of this one that nobody has."""
        self._failures.workers.add(worker)

    def leave(self, worker: Hashable) -> None:
        """See JobPace. Other workers of the step get the jobs."""
        self._failures.workers.discard(worker)
        for index, job in enumerate(self._step):
            if job.worker == worker and not job.is_answered:
                self._step[index] = self._queue.renew(job.number)

    def next_job(self, worker: Hashable) -> ServedJob | None:
        """See JobPace."""
        if not self._step:
            self._begin()
        taken = sum(job.worker is not None for job in self._step)
        if taken >= self._needed and any(job.worker == worker for job in self._step):
            return None  # it would still compute a job that nobody needs when the next step begins
        not_for = self._failures.not_for(worker)
        for index, job in enumerate(self._step):
            if job.worker is None and job.places not in not_for:
                self._step[index] = self._queue.assign(job.number, worker)
                return self._step[index]
        return None

    def refuse(self, job: ServedJob) -> None:
        """See JobPace."""
        self._failures.add(job)
        self._step[self._place(job)] = self._queue.renew(job.number)

    def answer(self, job: ServedJob) -> Sequence[ServedJob] | None:
        """See JobPace."""
        self._failures.drop(job)
        self._step[self._place(job)] = job
        answered = [job for job in self._step if job.is_answered]
        if len(answered) < self._needed:
            return None
        for job in self._step:
            if not job.is_answered:
                self._queue.give_back(job.number)
        self._step = []
        return answered

    def _begin(self) -> None:
        num_workers = max(1, len(self._failures.workers))
        if self._backup:
            self._needed = min(max(1, num_workers - self._backup), self._batch)
            samples, larger = divmod(self._batch, self._needed)
            for _ in range(min(num_workers, self._needed + self._backup)):
                # The larger jobs are cut first: a larger one that comes back must not leave a job of one sample.
                self._step.append(self._queue.cut(samples + (larger > 0)))
                larger -= self._step[-1].samples > samples
            self._step.sort(key=lambda job: job.places)
            return
        whole = self._queue.cut(self._batch)
        parts = num_workers if self._job_samples is None else -(-whole.samples // self._job_samples)
        self._step = self._queue.split(whole.number, parts)
        self._needed = len(self._step)

    def _place(self, job: ServedJob) -> int:
        return next(index for index, one in enumerate(self._step) if one.number == job.number)


class Unbounded:
    """async: every answer makes an update at once, however old its parameters are."""

    def __init__(self, queue: JobQueue, job_samples: int) -> None:
        self._queue, self._job_samples = queue, job_samples
        self._failures = Failures()

    def join(self, worker: Hashable) -> None:
        """See JobPace."""
        self._failures.workers.add(worker)

    def leave(self, worker: Hashable) -> None:
        """See JobPace."""
        self._failures.workers.discard(worker)
        for job in self._queue.at(worker):
            self._queue.give_back(job.number)

    def next_job(self, worker: Hashable) -> ServedJob | None:
        """See JobPace. There is always one."""
        job = self._queue.cut(self._job_samples, self._failures.not_for(worker))
        return self._queue.assign(job.number, worker)

    def refuse(self, job: ServedJob) -> None:
        """See JobPace."""
        self._failures.add(job)
        self._queue.give_back(job.number)

    def answer(self, job: ServedJob) -> Sequence[ServedJob] | None:
        """See JobPace."""
        self._failures.drop(job)
        return [job]


class Bounded(Unbounded):
    """bounded: as async, but a worker that is more than `staleness` jobs ahead of the slowest one waits.

    A worker's clock is the number of its jobs that have made updates. One that joins begins at the clock of the slowest
    worker, and one that is gone holds nobody up. Source: Ho et al., More Effective Distributed ML via a Stale
    Synchronous Parallel Parameter Server, NIPS 2013 (SSP).
    """

    def __init__(self, queue: JobQueue, job_samples: int, staleness: int) -> None:
        super().__init__(queue, job_samples)
        self._staleness = staleness
        self._clocks: dict[Hashable, int] = {}

    def join(self, worker: Hashable) -> None:
        """See JobPace."""
        super().join(worker)
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def leave(self, worker: Hashable) -> None:
        """See JobPace."""
        super().leave(worker)
        self._clocks.pop(worker, None)

    def next_job(self, worker: Hashable) -> ServedJob | None:
        """See JobPace."""
        if self._clocks[worker] - min(self._clocks.values()) > self._staleness:
            return None
        return super().next_job(worker)

    def answer(self, job: ServedJob) -> Sequence[ServedJob] | None:
        """See JobPace."""
        if job.worker in self._clocks:
            self._clocks[job.worker] += 1
        return super().answer(job)
