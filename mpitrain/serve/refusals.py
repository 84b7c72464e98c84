"""How often answers could not be used: is it the worker's fault, or that of the samples?"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from mpitrain.errors import GradientError
from mpitrain.serve.attendance import Attendance, Attendee
from mpitrain.serve.jobs import Places, ServedJob
from mpitrain.serve.pace import JobPace

# So many workers are enough to say that the samples, or the model, are at fault.
_MOST = 3


class Refusals:
    """Refuses answers, and counts them by samples and by worker."""

    def __init__(self, attendance: Attendance, pace: JobPace, say: Callable[[str], None]) -> None:
        self._attendance, self._pace, self._say = attendance, pace, say
        self._of_places: dict[Places, list[Hashable]] = {}
        self._in_a_row: dict[Hashable, int] = {}

    def accept(self, job: ServedJob, worker: Hashable) -> None:
        """Take in an answer that can be used."""
        self._of_places.pop(job.places, None)
        self._in_a_row.pop(worker, None)

    def send_away(self, attendee: Attendee, job: ServedJob, problem: str) -> None:
        """End a worker whose answer does not belong to this model. Its job goes to another one."""
        self._attendance.move()
        self._pace.refuse(job)
        attendee.tally.refused += 1
        self._attendance.dismiss(attendee, problem)

    def refuse(self, attendee: Attendee, job: ServedJob, kind: type[GradientError], problem: str) -> None:
        """Let other workers try a job. A worker that fails three times in a row is sent away.

        Raises:
            GradientError: of this kind: so many have failed that the samples or the model must be at fault.
        """
        attendee.tally.refused += 1
        self._pace.refuse(job)
        text = (
            f"{attendee.tally.name}, job {job.number} (epoch {job.epoch}, places {job.begin} to {job.end}): {problem}"
        )
        self._say(f"refused: {text}")
        num_here = len(self._attendance.here)
        if tried := self._count(job, attendee.peer, num_here):
            raise kind(
                f"{text}; {tried} could not compute these samples, and nothing was changed by them. Try a smaller "
                "learning rate or gradient clipping, or examine the samples"
            )
        if num_here > 1 and self._in_a_row.get(attendee.peer, 0) >= _MOST:
            self._attendance.dismiss(attendee, f"{problem}, for the third time in a row")

    def _count(self, job: ServedJob, worker: Hashable, num_workers: int) -> str:
        """Take in an answer that cannot be used. Return who has tried, if these are enough to end the run; else ""."""
        tried = self._of_places.setdefault(job.places, [])
        tried.append(worker)
        self._in_a_row[worker] = self._in_a_row.get(worker, 0) + 1
        if len(set(tried)) >= _MOST:
            return f"{len(set(tried))} workers"
        if num_workers < _MOST and len(tried) >= _MOST:
            return f"{len(tried)} tries of {num_workers} workers"
        return ""
