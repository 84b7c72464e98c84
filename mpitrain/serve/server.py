"""JobServer hands out jobs, takes in gradients, and makes updates. One thread, one loop, no MPI.

worker:  hello ─> welcome    next ─> job + parameters   done + gradients ─> job + parameters ...   ─> over
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from mpitrain.compression.codec import Codec
from mpitrain.errors import GradientError, NonFiniteError
from mpitrain.exchange.means import Means
from mpitrain.exchange.overlap import Overlap
from mpitrain.exchange.remarks import remarks_of
from mpitrain.serve.jobs import JobQueue, ServedJob
from mpitrain.serve.ledger import ServerLedger, WorkerTally
from mpitrain.serve.link import Gone, ServerLink
from mpitrain.serve.pace import Pace
from mpitrain.serve.pushes import Push, first_not_finite, mean_of, read_push
from mpitrain.serve.refusals import Refusals
from mpitrain.serve.store import ParameterStore
from mpitrain.serve.wire import Message
from mpitrain.training.loss_scale import LossScale

# The longest time without a look at the clock.
_LOOK_SECONDS = 0.5
# Workers that wait answer at once.
_FAREWELL_SECONDS = 5.0


@dataclass
class Attendee:
    """A worker that is here.

    Attributes:
        peer: the connection, by which the link and the pace know the worker.
        version: of the parameters that it has; -1: none.
        waits_since: since when it waits for a job; None: it does not.
        job_since: when its job went out.
        is_silent: its job was taken away, because no answer came.
    """

    peer: Hashable
    tally: WorkerTally
    version: int = -1
    waits_since: float | None = None
    job_since: float = 0.0
    is_silent: bool = False


@dataclass(frozen=True)
class ServerRules:
    """What does not change while a server runs.

    Attributes:
        life: a random text: an answer to a job of an earlier server has another one.
        facts: what every worker must have in common with the server, in lines.
        codec: of gradients.
        corrects_staleness: the learning rate is divided by the staleness.
        stall_seconds: after so long without an answer, a line says who is waited for.
        hang_seconds: a job without an answer for so long goes to another worker; 0: never.
        expected: the number of workers that will surely come, and wait for the end of the run.
        say: prints a line.
        now: the clock, in seconds.
    """

    life: str
    facts: Sequence[str]
    codec: Codec | None
    corrects_staleness: bool
    stall_seconds: float
    hang_seconds: float
    expected: int
    say: Callable[[str], None]
    now: Callable[[], float] = field(default=time.monotonic)


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
        pace: Pace,
        loss_scale: LossScale | None,
        rules: ServerRules,
    ) -> None:
        self.queue, self.ledger = queue, ServerLedger()
        self._link, self._store, self._pace = link, store, pace
        self._loss_scale, self._rules = loss_scale, rules
        self._here: dict[Hashable, Attendee] = {}
        self._events: deque[Message | Gone] = deque()
        self._pushes: dict[int, Push] = {}
        self._refusals = Refusals()
        self._moved = self._said = rules.now()

    def next_update(self) -> tuple[Means, float]:
        """Wait until workers have sent what makes the next update, and make it. Return the means and the learning rate.

        Raises:
            GradientError: several workers have sent what cannot be used for the same samples.
        """
        self._store.note_changes()  # hooks may have changed parameters since the last update
        while True:
            self._hand_out()
            if not self._events:
                self._events.extend(self._link.receive(_LOOK_SECONDS))
                self._look_at_the_clock()
            while self._events:
                jobs = self._handle(self._events.popleft())
                if jobs is not None:
                    made = self._update(jobs)
                    self._hand_out()
                    return made

    def close(self, reason: str, *, is_over: bool) -> None:
        """Close the link. Tell all workers that the run is over, or else, if there is a reason, that it has failed.

        Otherwise the workers wait until the server is there again.
        """
        if is_over:
            self._send_home()
        elif reason:
            for peer in self._here:
                self._link.send(peer, "refused", {"text": reason})
        self._link.close()

    def _send_home(self) -> None:
        """Tell all workers that the run is over, also those that come now. Wait for their farewell, but not for long.

        A worker that still computes then reads of the end when it has sent its answer.
        """
        for peer in self._here:
            self._link.send(peer, "over", {})
        told, left = set(self._here), set[Hashable]()
        begun = self._rules.now()
        patience = self._rules.hang_seconds if self._rules.expected else _FAREWELL_SECONDS
        while told - left or len(told) < self._rules.expected:
            if patience and self._rules.now() - begun > patience:
                return
            for event in [*self._events, *self._link.receive(_LOOK_SECONDS)]:
                if isinstance(event, Gone) or event.kind == "bye":
                    left.add(event.peer)
                elif event.peer not in told:
                    told.add(event.peer)
                    self._link.send(event.peer, "over", {})
            self._events.clear()

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, event: Message | Gone) -> Sequence[ServedJob] | None:
        """Take in an event. Return the jobs whose gradients make an update, if they do."""
        if isinstance(event, Gone):
            self._leave(event.peer, event.why)
            return None
        attendee = self._here.get(event.peer)
        if event.kind == "hello":
            self._join(event)
        elif event.kind == "bye":
            self._leave(event.peer, "it has ended")
        elif attendee is None or event.fields.get("life") != self._rules.life:
            self._link.send(event.peer, "again", {})
        elif event.kind == "next":
            if attendee.waits_since is not None:  # it learns that the server is still there
                self._link.send(event.peer, "wait", {})
            self._wait(attendee, event.fields.get("version"))
        elif event.kind == "failed":
            return self._failed(attendee, event.fields)
        elif event.kind == "done":
            return self._done(attendee, event.fields, event.arrays)
        else:
            self._dismiss(attendee, f"a message of kind {event.kind!r} came; allowed are next, done, failed and bye")
        return None

    def _join(self, event: Message) -> None:
        """Take in a worker, or refuse it. A worker that is here has lost the welcome, or its job, and begins again."""
        fields, known = event.fields, self._here.get(event.peer)
        number = len(self.ledger.workers) + 1
        name = fields.get("name") or f"worker {number} on {fields.get('host', 'an unknown host')}"
        if problem := _difference(fields.get("facts"), self._rules.facts):
            self._rules.say(f"{name} is refused: {problem}")
            self._link.send(event.peer, "refused", {"text": f"the server refuses {name}: {problem}"})
            return
        if known is not None:
            self._pace.leave(event.peer)
            self._pace.join(event.peer)
            known.version, known.waits_since = -1, None
        else:
            tally = WorkerTally(str(name))
            self.ledger.workers.append(tally)
            self._here[event.peer] = known = Attendee(event.peer, tally)
            self._pace.join(event.peer)
            self._rules.say(f"{name} has joined; {len(self._here)} here")
        self._link.send(event.peer, "welcome", {"life": self._rules.life, "name": known.tally.name})

    def _leave(self, peer: Hashable, why: str) -> None:
        attendee = self._here.pop(peer, None)
        if attendee is None:
            return
        attendee.tally.is_here = False
        self._refusals.forget(peer)
        self._pace.leave(peer)
        self._rules.say(f"{attendee.tally.name} has gone ({why}); {len(self._here)} here")

    def _dismiss(self, attendee: Attendee, problem: str) -> None:
        """End a worker that cannot be worked with."""
        text = f"the server dismisses {attendee.tally.name}: {problem}"
        self._link.send(attendee.peer, "refused", {"text": text})
        self._leave(attendee.peer, problem)

    def _wait(self, attendee: Attendee, version: Any) -> None:
        """A worker asks for a job. It repeats that while it waits."""
        if attendee.is_silent:
            attendee.is_silent = False
            self._pace.join(attendee.peer)
        if attendee.waits_since is None and not self.queue.at(attendee.peer):
            attendee.waits_since = self._rules.now()
            attendee.version = version if isinstance(version, int) and version <= self._store.version else -1

    def _done(
        self, attendee: Attendee, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]
    ) -> Sequence[ServedJob] | None:
        job = self.queue.answer(_number(fields), attendee.peer)
        self.ledger.bytes_in += sum(array.nbytes for array in arrays)
        self._wait(attendee, fields.get("version"))
        if job is None:  # the job was given to another worker, or is not needed any more
            attendee.tally.dropped += 1
            return None
        self._moved = self._rules.now()
        try:
            push = read_push(fields, arrays, self._store.layout, self._rules.codec)
            if not 0 <= push.version <= self._store.version:
                raise GradientError(f"gradients of version {push.version} came; the newest is {self._store.version}")
        except GradientError as error:
            self._pace.refuse(job)
            attendee.tally.refused += 1
            self._dismiss(attendee, str(error))
            return None
        may_skip = self._loss_scale is not None and push.scale > 1
        if not may_skip and not (numpy.isfinite(push.loss) and push.is_finite):
            where = "the loss" if push.is_finite else f"the gradient of {first_not_finite(push, self._store.layout)}"
            return self._refuse(attendee, job, NonFiniteError, f"{where} holds NaN or infinity")
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
        places = f"epoch {job.epoch}, samples {job.begin} to {job.end - 1} of its order"
        text = f"{attendee.tally.name}, job {job.number} ({places}): {problem}"
        self._rules.say(f"refused: {text}")
        tried = self._refusals.count(job, attendee.peer, len(self._here))
        if tried:
            raise kind(
                f"{text}. {tried} could not compute these samples, so nothing was changed by this step. Try a smaller "
                "learning rate or gradient clipping, or examine these samples"
            )
        if self._refusals.is_too_often(attendee.peer) and len(self._here) > 1:
            self._dismiss(attendee, f"{problem}, for the third time in a row")

    # -- jobs and updates -----------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give jobs to the workers that wait, those first that have waited longest."""
        waiting = [one for one in self._here.values() if one.waits_since is not None]
        for attendee in sorted(waiting, key=lambda one: one.waits_since or 0.0):
            job = self._pace.next_job(attendee.peer)
            if job is None:
                continue
            pulled, arrays = self._store.since(attendee.version)
            fields = {"number": job.number, "epoch": job.epoch, "begin": job.begin, "end": job.end, **pulled}
            fields["loss_scale"] = self._loss_scale.state() if self._loss_scale else None
            self._link.send(attendee.peer, "job", fields, arrays)
            self.ledger.bytes_out += sum(array.nbytes for array in arrays)
            attendee.waits_since, attendee.job_since = None, self._rules.now()

    def _update(self, jobs: Sequence[ServedJob]) -> tuple[Means, float]:
        """Make the update from the gradients of these jobs. Gradients that are needed no more are dropped."""
        pushes = [self._pushes.pop(job.number) for job in jobs]
        # Jobs that were given back have other numbers when they go out again.
        total = sum(job.samples for job in jobs)
        loss = sum(job.samples * push.loss for job, push in zip(jobs, pushes, strict=True)) / total
        cause = None
        if not all(push.is_finite for push in pushes):
            cause = NonFiniteError("the loss scale made a gradient infinite")
        staleness = max(self._store.version - push.version for push in pushes)
        means = Means(loss, total, Overlap(0.0, 0.0, 0.0), cause, remarks_of([push.told for push in pushes]))
        rate = 0.0
        if means.is_finite:
            factor = 1 / max(1, staleness) if self._rules.corrects_staleness else 1.0
            rate = self._store.apply(mean_of(jobs, pushes), means.remarks, factor)
            self.ledger.updates += 1
            self.ledger.staleness.update(self._store.version - 1 - push.version for push in pushes)
        if self._loss_scale:
            self._loss_scale.update(skipped=not means.is_finite)
        for job in jobs:
            self.queue.use(job.number)
        return means, rate

    def _look_at_the_clock(self) -> None:
        """Take jobs from workers that are silent, and say for whom the server waits."""
        now, rules = self._rules.now(), self._rules
        for attendee in [*self._here.values()]:
            out = self.queue.at(attendee.peer)
            if rules.hang_seconds and out and now - attendee.job_since > rules.hang_seconds:
                attendee.is_silent = True
                self._pace.leave(attendee.peer)
                rules.say(
                    f"{attendee.tally.name} has not answered job {out[0].number} for {now - attendee.job_since:.0f} s; "
                    "others get its samples"
                )
        if now - max(self._moved, self._said) < rules.stall_seconds:
            return
        self._said = now
        busy = [one.tally.name for one in self._here.values() if self.queue.at(one.peer)]
        if not self._here:
            rules.say("there is no worker; the server waits for some")
        elif busy:
            rules.say(f"no answer for {now - self._moved:.0f} s; the server waits for {', '.join(busy)}")


def _number(fields: Mapping[str, Any]) -> int:
    number = fields.get("number")
    return number if isinstance(number, int) else -1


def _difference(theirs: Any, ours: Sequence[str]) -> str:
    """Return the first difference between what a worker and the server train; "" if there is none."""
    if not isinstance(theirs, list):
        return "it does not say what it trains; is its version of mpitrain the server's?"
    for line, own in zip(theirs, ours, strict=False):
        if line != own:
            return f"it has {line!r}, the server {own!r}; start it with the server's script and arguments"
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} lines of parameters and data, the server {len(ours)}"
    return ""
