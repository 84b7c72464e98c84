"""What a server takes in: workers come and go, ask and answer, and other servers say what they have of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mpitrain.errors import GradientError, NonFiniteError
from mpitrain.serve.answers import Answer, Answers
from mpitrain.serve.attendance import MOST_SAID, Attendance, Attendee, ServerRules
from mpitrain.serve.jobs import JobQueue, ServedJob
from mpitrain.serve.link import Gone, ServerLink
from mpitrain.serve.pace import JobPace
from mpitrain.serve.pushes import Push, read_push
from mpitrain.serve.refusals import Refusals
from mpitrain.serve.shards import Shards
from mpitrain.serve.store import ParameterStore
from mpitrain.serve.wire import Message


class MessageDesk:
    """Takes in the events of a server one after the other, and decides which answers count."""

    def __init__(
        self,
        link: ServerLink,
        store: ParameterStore,
        queue: JobQueue,
        pace: JobPace,
        attendance: Attendance,
        shards: Shards,
        rules: ServerRules,
        *,
        may_skip: bool,
    ) -> None:
        """`may_skip`: there is a loss scale, which may have made gradients infinite."""
        self._link, self._store, self._queue, self._pace = link, store, queue, pace
        self._attendance, self._shards, self._rules = attendance, shards, rules
        self._answers = Answers(1 + shards.num)
        self._refusals = Refusals(attendance, pace, rules.say)
        self._strangers = shards.strangers
        self._may_skip = may_skip

    def answers_to(self, jobs: Sequence[ServedJob]) -> tuple[list[Answer], list[Push]]:
        """Return the answers to these jobs, for an update. They are not kept."""
        return self._answers.take(jobs)

    def look_at_strangers(self) -> None:
        """Say from time to time who could not come in."""
        self._strangers.look()

    def take(self, event: Message | Gone) -> Sequence[ServedJob] | None:
        """Take in an event. Return the jobs whose gradients make an update, if they do."""
        if self._shards.knows(event.peer):
            return self._shard_says(event)
        attendee = self._attendance.here.get(event.peer)
        if isinstance(event, Gone) or event.kind in ("hello", "bye"):
            self._come_or_go(event)
        elif attendee is None or event.fields.get("life") != self._rules.life:
            self._link.send(event.peer, "again", {})
        elif event.kind == "next":
            self._attendance.ask(attendee, event.fields, self._store.version)
        elif event.kind == "failed":
            self._failed(attendee, event.fields)
        elif event.kind == "done":
            return self._done(attendee, event.fields, event.arrays)
        else:
            problem = f"a message of kind {event.kind[:100]!r} came; allowed are hello, next, done, failed and bye"
            self._attendance.dismiss(attendee, problem)
        return None

    def _come_or_go(self, event: Message | Gone) -> None:
        if isinstance(event, Gone):
            if event.peer not in self._attendance.here:
                self._strangers.leave(event.why)
            self._attendance.leave(event.peer, event.why)
        elif event.kind == "hello":
            self._attendance.join(event, self._shards.ports)
        else:
            self._attendance.leave(event.peer, "it has ended")
        self._shards.forget(*self._queue.numbers)  # what the worker has sent them of its job

    def _done(
        self, attendee: Attendee, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]
    ) -> Sequence[ServedJob] | None:
        """Take in gradients. The worker asks for its next job with them."""
        job = self._queue.find(_number(fields), attendee.peer)
        nbytes = sum(array.nbytes for array in arrays)
        self._attendance.ledger.servers[0].bytes_in += nbytes
        attendee.tally.pushed_bytes += nbytes
        if job is None:  # the job was given to another worker, or is not needed any more
            self._attendance.ask(attendee, fields, self._store.version)
            attendee.tally.dropped += 1
            return None
        try:
            push = read_push(fields, arrays, self._store.layout, self._store.part, self._rules.codec)
            self._store.check_note(push.told[1])
            if not 0 <= push.version <= self._store.version:
                raise GradientError(f"gradients of version {push.version} came; the newest is {self._store.version}")
        except GradientError as error:
            self._refusals.send_away(attendee, job, str(error))
            return None
        answer = self._answers.add(job.number, attendee.ticket, 0, push.not_finite, push)
        return self._answered(attendee, job, answer)

    def _shard_says(self, event: Message | Gone) -> Sequence[ServedJob] | None:
        """Take in what another server has sent a worker, or has of an answer, or that it is gone."""
        if isinstance(event, Gone):
            self._shards.lose(event.peer, event.why)
        fields, number = event.fields, self._shards.heard(event)
        if event.kind == "pulled":
            self._attendance.tallies[fields["ticket"]].pulled_bytes += fields["pulled_bytes"]
        if event.kind != "have":
            return None
        self._attendance.tallies[fields["ticket"]].pushed_bytes += fields["pushed_bytes"]
        attendee = self._attendance.with_ticket(fields["ticket"])
        if attendee is None or (job := self._queue.find(fields["number"], attendee.peer)) is None:
            return None
        if fields["problem"]:
            self._refusals.send_away(attendee, job, fields["problem"])
            return None
        answer = self._answers.add(job.number, attendee.ticket, number, fields["not_finite"])
        return self._answered(attendee, job, answer)

    def _answered(self, attendee: Attendee, job: ServedJob, answer: Answer | None) -> Sequence[ServedJob] | None:
        """Take in an answer, if all servers have their parts of it."""
        if answer is None or answer.push is None:
            return None
        answered, push = self._queue.answer(job.number, attendee.peer), answer.push
        assert answered is not None
        self._attendance.move()
        self._attendance.ask(attendee, {"version": push.version}, self._store.version)
        may_skip = self._may_skip and push.scale > 1
        not_finite = answer.first_not_finite
        if not may_skip and not (math.isfinite(push.loss) and not not_finite):
            where = f"{not_finite} holds" if not_finite else "the loss is"
            self._refuse(attendee, answered, NonFiniteError, f"{where} NaN or infinity")
            return None
        self._refusals.accept(answered, attendee.peer)
        attendee.tally.jobs += 1
        attendee.tally.samples += answered.samples
        attendee.tally.seconds += self._rules.now() - attendee.job_since
        return self._pace.answer(answered)

    def _failed(self, attendee: Attendee, fields: Mapping[str, Any]) -> None:
        """A worker says that it could not compute the gradients of its job. It ends by itself."""
        job = self._queue.answer(_number(fields), attendee.peer)
        if job is not None:
            self._refuse(attendee, job, GradientError, str(fields.get("text"))[:MOST_SAID])

    def _refuse(self, attendee: Attendee, job: ServedJob, kind: type[GradientError], problem: str) -> None:
        """Let other workers try a job, unless so many have failed that the samples or the model must be at fault."""
        try:
            self._refusals.refuse(attendee, job, kind, problem)
        finally:
            self._shards.forget(*self._queue.numbers)

    def drop_late(self) -> None:
        """Drop the answers to jobs that are over, or another worker's. Who has sent one waits for its next job."""
        for answer in self._answers.keep(set(self._queue.numbers[1])):
            attendee = self._attendance.with_ticket(answer.ticket)
            if attendee is not None and answer.push is not None:
                self._attendance.ask(attendee, {"version": answer.push.version}, self._store.version)
                attendee.tally.dropped += 1


def _number(fields: Mapping[str, Any]) -> int:
    number = fields.get("number")
    return number if type(number) is int else -1
