"""What `mpitrain ps` shows of a server: its workers, its queue, the staleness of gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, Literal

from mpitrain.serve.attendance import Attendance, Attendee
from mpitrain.serve.jobs import JobQueue
from mpitrain.serve.ledger import WorkerTally
from mpitrain.watching.activity import own_activity

# A text of 100 workers takes 0.5 ms.
_EVERY_SECONDS = 1.0
# The speed is that between this many looks, each a second or more after the one before, with new answers.
_LOOKS = 11
# A run may have many workers that are gone. Those that joined last are shown, the others only in the sum.
_MOST_GONE = 100


class ServerStatus:
    """Publishes the state of a JobServer in the record of its process, if the process has one."""

    def __init__(
        self,
        attendance: Attendance,
        queue: JobQueue,
        expected: int,
        now: Callable[[], float],
        parts: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """`parts`: see Shards.parts."""
        self._parts = parts
        self._attendance, self._queue, self._expected, self._now = attendance, queue, expected, now
        self._written, self._shown = float("-inf"), (0, 0)
        self._looks: deque[tuple[float, int]] = deque([(now(), 0)], _LOOKS)
        self._activity, self._stage, self._has_failed = own_activity(), "runs", False

    def show(self) -> None:
        """Publish the state, unless that was done a moment ago and nobody has come or gone since."""
        now, attendance = self._now(), self._attendance
        there = len(attendance.ledger.workers), len(attendance.here)
        if self._activity is not None and (now - self._written >= _EVERY_SECONDS or there != self._shown):
            self._written, self._shown = now, there
            self._activity.serve(self._facts(now))

    def enter(self, stage: Literal["leaves", "over"], *, has_failed: bool) -> None:
        """Publish that the run is over, or has failed: workers hear of it, or all have gone."""
        self._stage, self._has_failed, self._written = stage, has_failed, float("-inf")
        self.show()

    def _facts(self, now: float) -> dict[str, Any]:
        """Return all, as JSON can hold it. `at`: now, by time.monotonic()."""
        ledger, here = self._attendance.ledger, self._attendance.here.values()
        gone = [one for one in ledger.workers if not one.is_here]
        busy = self._queue.workers()
        workers = [{**_plain(one.tally), **_doing(one, busy, now)} for one in here]
        workers += [{**_plain(one), "state": "gone"} for one in gone[-_MOST_GONE:]]
        everyone = {**_sums(ledger.workers), "pulled_bytes": ledger.bytes_out, "pushed_bytes": ledger.bytes_in}
        return {
            "at": now,
            "stage": self._stage,
            "has_failed": self._has_failed,
            "servers": len(ledger.servers),
            "parts": self._parts(),
            "expected": self._expected,
            "joined": len(ledger.workers),
            "here": len(here),
            "workers": workers,
            "all": {**everyone, "samples_per_second": self._speed(now)},
            "queue": self._queue.summary(),
            "staleness": {str(staleness): ledger.staleness[staleness] for staleness in sorted(ledger.staleness)},
        }

    def _speed(self, now: float) -> float:
        """Return the samples a second of all workers, since about ten seconds or ten answers.

        A silence that is longer than those between the answers before counts too, so the speed falls when answers end.
        """
        looks, samples = self._looks, sum(one.samples for one in self._attendance.ledger.workers)
        silent = now - looks[-1][0]
        longest = max((later - earlier for (earlier, _), (later, _) in pairwise(looks)), default=0.0)
        if not samples:
            looks[0] = now, 0  # the wait for the first worker is not its speed
        elif silent >= _EVERY_SECONDS and (samples != looks[-1][1] or silent > longest):
            looks.append((now, samples))
        (begin, before), (end, after) = looks[0], looks[-1]
        return (after - before) / (end - begin) if end > begin else 0.0


def _plain(tally: WorkerTally) -> dict[str, Any]:
    return {
        "name": tally.name.removesuffix(f" on {tally.host}"),
        "host": tally.host,
        **_sums([tally]),
        "samples_per_second": tally.samples_per_second,
    }


def _sums(tallies: Collection[WorkerTally]) -> dict[str, int]:
    names = ("jobs", "samples", "pulled_bytes", "pushed_bytes", "refused", "dropped")
    return {name: sum(getattr(one, name) for one in tallies) for name in names}


def _doing(attendee: Attendee, busy: Collection[object], now: float) -> dict[str, Any]:
    """Return what a worker does, and for how long; no time for one that has not asked for a job yet."""
    if attendee.waits_since is not None:
        return {"state": "waits", "seconds": now - attendee.waits_since}
    if attendee.is_overdue or attendee.is_silent:
        return {"state": "overdue", "seconds": now - attendee.job_since}
    if attendee.peer in busy:
        return {"state": "computes", "seconds": now - attendee.job_since}
    return {"state": "joins"}
