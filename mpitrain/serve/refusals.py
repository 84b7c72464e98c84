"""How often answers could not be used: is it the worker's fault, or that of the samples?"""

from __future__ import annotations

from collections.abc import Hashable

from mpitrain.serve.jobs import Places, ServedJob

# So many workers are enough to say that the samples, or the model, are at fault.
_MOST = 3


class Refusals:
    """Counts refused answers, by samples and by worker."""

    def __init__(self) -> None:
        self._of_places: dict[Places, list[Hashable]] = {}
        self._in_a_row: dict[Hashable, int] = {}

    def accept(self, job: ServedJob, worker: Hashable) -> None:
        """Take in an answer that can be used."""
        self._of_places.pop(job.places, None)
        self._in_a_row.pop(worker, None)

    def count(self, job: ServedJob, worker: Hashable, num_workers: int) -> str:
        """Take in an answer that cannot be used. Return who has tried, if these are enough to end the run; else ""."""
        tried = self._of_places.setdefault(job.places, [])
        tried.append(worker)
        self._in_a_row[worker] = self._in_a_row.get(worker, 0) + 1
        if len(set(tried)) >= _MOST:
            return f"{len(set(tried))} workers"
        if num_workers < _MOST and len(tried) >= _MOST:
            return f"{len(tried)} tries of {num_workers} workers"
        return ""

    def is_too_often(self, worker: Hashable) -> bool:
        """True if the last answers of a worker could not be used, while others may be able to."""
        return self._in_a_row.get(worker, 0) >= _MOST
