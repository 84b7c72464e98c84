"""JobServer hands out jobs, takes in gradients, and makes updates. One thread, one loop, no MPI.

worker:  hello ─> welcome    next ─> job + parameters   done + gradients ─> job + parameters ...   ─> over
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy

from mpitrain.errors import GradientError, NonFiniteError
from mpitrain.exchange.means import Means
from mpitrain.exchange.overlap import Overlap
from mpitrain.exchange.remarks import remarks_of
from mpitrain.serve.attendance import Attendance, Attendee, ServerRules
from mpitrain.serve.jobs import JobQueue, ServedJob
from mpitrain.serve.link import Gone, ServerLink
from mpitrain.serve.pace import JobPace
from mpitrain.serve.pushes import Push, first_not_finite, mean_of, read_push
from mpitrain.serve.refusals import Refusals
from mpitrain.serve.status import ServerStatus
from mpitrain.serve.store import ParameterStore
from mpitrain.serve.strangers import Strangers
from mpitrain.serve.wire import Message
from mpitrain.training.loss_scale import LossScale

# The longest time without a look at the clock.
_LOOK_SECONDS = 0.5
# Workers that wait for a job answer a farewell at once.
_FAREWELL_SECONDS = 5.0


class JobServer:
    """Makes updates of a ParameterStore from the gradients of workers.

    Attributes:
        queue: the position in the data.
        ledger: what has happened so far.
    """

    def __init__(
        self,
        link: ServerLink,
        store: ParameterStore,
        queue: JobQueue,
        pace: JobPace,
        loss_scale: LossScale | None,
        rules: ServerRules,
    ) -> None:
        self.queue = queue
        self._link, self._store, self._pace = link, store, pace
        self._loss_scale, self._rules = loss_scale, rules
        self._attendance = Attendance(link, queue, pace, rules)
        self.ledger = self._attendance.ledger
        self._status = ServerStatus(self._attendance, queue, rules.expected, rules.now)
        self._events: deque[Message | Gone] = deque()
        self._pushes: dict[int, Push] = {}  # by the numbers of their jobs
        self._refusals = Refusals()
        self._left: float | None = None  # when the last update had been made
        self._strangers = Strangers(link, rules.say, rules.now)

    def next_update(self) -> tuple[Means, float]:
        """Wait until workers have sent what makes the next update, and make it. Return the means and the learning rate.

        Raises:
            GradientError: several workers have sent what cannot be used for the same samples.
        """
        self._store.note_changes()  # by the last update, and by the hooks after it: no job goes out before them
        if self._left is not None:
            self._attendance.was_away(self._rules.now() - self._left)
        while True:
            self._hand_out()
            self._status.show()
            if not self._events:
                self._events.extend(self._link.receive(_LOOK_SECONDS))
                self._attendance.look_at_the_clock()
                self._strangers.look()
            while self._events:
                if jobs := self._handle(self._events.popleft()):
                    made = self._update(jobs)
                    self._left = self._rules.now()
                    return made

    def close(self, reason: str, *, is_over: bool) -> None:
        """Close the link. Tell all workers that the run is over, or else, if there is a reason, that it has failed.

        Otherwise the workers wait until the server is there again.
        """
        if is_over:
            self._send_home("over", {})
        elif reason:
            self._send_home("refused", {"text": reason})
        self._link.close()

    def _send_home(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Tell all workers that the run has ended, also those that come now. Wait for their farewell, but not for long.

        A worker that still computes reads of the end when it has sent its answer. What it has not read is lost with the
        connection, so the connection stays for `hang_seconds`, or until the worker has gone.
        """
        here = self._attendance.here
        for attendee in here.values():
            self._link.send(attendee.peer, kind, fields)
        told, left = set(here), set[Hashable]()
        busy = {attendee.peer: attendee.tally.name for attendee in here.values() if attendee.waits_since is None}
        begun = said = self._rules.now()
        missing = self._rules.expected - len(self.ledger.workers)
        while told - left or len(told) - len(here) < missing:
            now = self._rules.now()
            patience = self._rules.hang_seconds if self._rules.expected or busy else _FAREWELL_SECONDS
            if patience and now - begun > patience:
                return
            if busy and now - said >= self._rules.stall_seconds:
                self._rules.say(f"the run has ended; the server waits for {', '.join(busy.values())} to read of it")
                said = now
            for event in [*self._events, *self._link.receive(_LOOK_SECONDS)]:
                if busy.pop(event.peer, None) and not busy:
                    begun = self._rules.now()  # the last one has read of the end by now, or is about to
                if isinstance(event, Gone) or event.kind == "bye":
                    left.add(event.peer)
                elif event.peer not in told:
                    told.add(event.peer)
                    self._link.send(event.peer, kind, fields)
            self._events.clear()

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, event: Message | Gone) -> Sequence[ServedJob] | None:
        """Take in an event. Return the jobs whose gradients make an update, if they do."""
        if isinstance(event, Gone):
            if event.peer not in self._attendance.here:
                self._strangers.leave(event.why)
            self._attendance.leave(event.peer, event.why)
            return None
        attendee = self._attendance.here.get(event.peer)
        if event.kind == "hello":
            self._attendance.join(event)
        elif event.kind == "bye":
            self._attendance.leave(event.peer, "it has ended")
        elif attendee is None or event.fields.get("life") != self._rules.life:
            self._link.send(event.peer, "again", {})
        elif event.kind == "next":
            self._attendance.ask(attendee, event.fields, self._store.version)
        elif event.kind == "failed":
            self._failed(attendee, event.fields)
        elif event.kind == "done":
            return self._done(attendee, event.fields, event.arrays)
        else:
            problem = f"a message of kind {event.kind!r} came; allowed are hello, next, done, failed and bye"
            self._attendance.dismiss(attendee, problem)
        return None

    def _done(
        self, attendee: Attendee, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]
    ) -> Sequence[ServedJob] | None:
        """Take in gradients. The worker asks for its next job with them."""
        job = self.queue.answer(_number(fields), attendee.peer)
        attendee.tally.pushed_bytes += sum(array.nbytes for array in arrays)
        self._attendance.ask(attendee, fields, self._store.version)
        if job is None:  # the job was given to another worker, or is not needed any more
            attendee.tally.dropped += 1
            return None
        self._attendance.move()
        try:
            push = read_push(fields, arrays, self._store.layout, self._rules.codec)
            self._store.check_note(push.told[1])
            if not 0 <= push.version <= self._store.version:
                raise GradientError(f"gradients of version {push.version} came; the newest is {self._store.version}")
        except GradientError as error:
            self._pace.refuse(job)
            attendee.tally.refused += 1
            self._attendance.dismiss(attendee, str(error))
            return None
        may_skip = self._loss_scale is not None and push.scale > 1
        if not may_skip and not (math.isfinite(push.loss) and push.is_finite):
            where = "the loss is" if push.is_finite else f"{first_not_finite(push, self._store.layout)} holds"
            self._refuse(attendee, job, NonFiniteError, f"{where} NaN or infinity")
            return None
        self._refusals.accept(job, attendee.peer)
        attendee.tally.jobs += 1
        attendee.tally.samples += job.samples
        attendee.tally.seconds += self._rules.now() - attendee.job_since
        self._pushes[job.number] = push
        return self._pace.answer(job)

    def _failed(self, attendee: Attendee, fields: Mapping[str, Any]) -> None:
        """A worker says that it could not compute the gradients of its job. It ends by itself."""
        job = self.queue.answer(_number(fields), attendee.peer)
        if job is not None:
            self._refuse(attendee, job, GradientError, str(fields.get("text")))

    def _refuse(self, attendee: Attendee, job: ServedJob, kind: type[GradientError], problem: str) -> None:
        """Let other workers try a job, unless so many have failed that the samples or the model must be at fault."""
        attendee.tally.refused += 1
        self._pace.refuse(job)
        text = (
            f"{attendee.tally.name}, job {job.number} (epoch {job.epoch}, places {job.begin} to {job.end}): {problem}"
        )
        self._rules.say(f"refused: {text}")
        num_here = len(self._attendance.here)
        if tried := self._refusals.count(job, attendee.peer, num_here):
            raise kind(
                f"{text}; {tried} could not compute these samples, and nothing was changed by them. Try a smaller "
                "learning rate or gradient clipping, or examine the samples"
            )
        if num_here > 1 and self._refusals.is_too_often(attendee.peer):
            self._attendance.dismiss(attendee, f"{problem}, for the third time in a row")

    # -- jobs and updates -----------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        if len(self.ledger.workers) < self._rules.expected:
            return
        for attendee in self._attendance.waiting():
            job = self._job_for(attendee)
            if job is None:
                continue
            pulled, arrays = self._store.since(attendee.version)
            fields = {"number": job.number, "epoch": job.epoch, "begin": job.begin, "end": job.end, **pulled}
            fields["loss_scale"] = self._loss_scale.state() if self._loss_scale else None
            self._link.send(attendee.peer, "job", fields, arrays)
            attendee.tally.pulled_bytes += sum(array.nbytes for array in arrays)
            now = self._rules.now()
            attendee.tally.waited_seconds += now - (attendee.waits_since or now)
            attendee.waits_since, attendee.job_since = None, now
            attendee.job_clock = self._attendance.clock()

    def _job_for(self, attendee: Attendee) -> ServedJob | None:
        """Return a job for a worker that is free; first one that another worker does not answer."""
        while True:
            has_taken = self._attendance.take_overdue()
            job = self._pace.next_job(attendee.peer)
            if job is not None or not has_taken:
                return job

    def _update(self, jobs: Sequence[ServedJob]) -> tuple[Means, float]:
        """Make the update from the gradients of these jobs."""
        pushes = [self._pushes.pop(job.number) for job in jobs]
        total = sum(job.samples for job in jobs)
        loss = sum(job.samples * push.loss for job, push in zip(jobs, pushes, strict=True)) / total
        is_finite = self._loss_scale is None or all(push.is_finite for push in pushes)
        cause = None if is_finite else NonFiniteError("the loss scale made a gradient infinite")
        means = Means(loss, total, Overlap(0.0, 0.0, 0.0), cause, remarks_of([push.told for push in pushes]))
        rate = 0.0
        if is_finite:
            staleness = [self._store.version - push.version for push in pushes]
            factor = 1 / max(1, *staleness) if self._rules.corrects_staleness else 1.0
            rate = self._store.apply(mean_of(jobs, pushes), means.remarks, factor, max(staleness))
            self.ledger.updates += 1
            self.ledger.staleness.update(staleness)
        if self._loss_scale:
            self._loss_scale.update(skipped=not is_finite)
        for job in jobs:
            self.queue.use(job.number)
        return means, rate


def _number(fields: Mapping[str, Any]) -> int:
    number = fields.get("number")
    return number if type(number) is int else -1
