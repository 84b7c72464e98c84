"""JobServer hands out jobs, takes in gradients, and makes updates. One thread, one loop, no MPI.

worker:  hello ─> welcome    next ─> job + parameters   done + gradients ─> job + parameters ...   ─> over

With several servers, this is the first one. It alone decides; the others (serve.shards) have parts of the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.errors import ConfigError
from mpitrain.exchange.means import Means
from mpitrain.serve.attendance import Attendance, Attendee, ServerRules
from mpitrain.serve.farewell import send_home
from mpitrain.serve.jobs import JobQueue, ServedJob
from mpitrain.serve.ledger import ServerTally
from mpitrain.serve.link import Gone, ServerLink
from mpitrain.serve.messages import MessageDesk
from mpitrain.serve.pace import JobPace
from mpitrain.serve.shards import Shards
from mpitrain.serve.status import ServerStatus
from mpitrain.serve.store import ParameterStore
from mpitrain.serve.update import ServedUpdate
from mpitrain.serve.wire import Message

# The longest time without a look at the clock.
_LOOK_SECONDS = 0.5
# How long other servers are waited for after an error.
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
        adapter: Adapter,
        rules: ServerRules,
        *,
        host: str,
        num_servers: int = 1,
        carried: Mapping[numpy.dtype, numpy.ndarray] | None = None,
    ) -> None:
        """
        Args:
            host: of this server, with its rank if it has one.
            carried: flat buffers that are added to the gradients of the first update.
        """
        self.queue = queue
        self._link, self._store, self._pace = link, store, pace
        self._loss_scale, self._rules = adapter.loss_scale, rules
        self._attendance = Attendance(link, queue, pace, rules)
        self.ledger = self._attendance.ledger
        self._events: deque[Message | Gone] = deque()
        self._left: float | None = None  # when the last update had been made
        self.ledger.servers = [ServerTally() for _ in range(num_servers)]
        self._shards = Shards(link, self._events, adapter, rules, self.ledger.servers, host)
        self._status = ServerStatus(self._attendance, queue, rules.expected, rules.now, self._shards.parts)
        may_skip = self._loss_scale is not None
        self._desk = MessageDesk(link, store, queue, pace, self._attendance, self._shards, rules, may_skip=may_skip)
        self._has_begun = False
        self._carried = carried or {}
        store.carry({dtype: flat[store.part[dtype]] for dtype, flat in self._carried.items()})

    def next_update(self) -> tuple[Means, float]:
        """Wait until workers have sent what makes the next update, and make it. Return the means and the learning rate.

        Raises:
            GradientError: several workers have sent what cannot be used for the same samples.
            LaunchError: another server is gone.
        """
        if not self._has_begun:
            self._has_begun = True
            self._shards.gather()
            self._shards.begin(self._store.version, self._carried)
            self._carried = {}
        # By the last update, and by the hooks after it: no job goes out before them.
        changes = self._shards.changes()
        self._store.note_changes(elsewhere=bool(changes))
        self._shards.settle(self._store.version, changes)
        if self._left is not None:
            self._attendance.was_away(self._rules.now() - self._left)
        while True:
            self._hand_out()
            self._status.show()
            if not self._events:
                self._events.extend(self._link.receive(_LOOK_SECONDS))
                quiet_seconds = self._attendance.quiet_seconds
                self._attendance.look_at_the_clock(self._shards.look(self._attendance.clock(), quiet_seconds))
                self._desk.look_at_strangers()
            while self._events:
                if jobs := self._desk.take(self._events.popleft()):
                    made = self._update(jobs)
                    self._left = self._rules.now()
                    return made

    def fetch(self) -> None:
        """Bring the parameters and the optimizer's state of all servers into the model of this one.

        Raises:
            LaunchError: another server is gone.
        """
        self._shards.fetch()

    def close(self, error: BaseException | None, *, tells: bool) -> None:
        """Close the link. Tell all workers that the run is over, or that `error` has ended it.

        Args:
            error: what has ended the run; None: it is over.
            tells: workers hear of the error, and end. Otherwise they wait until the server is there again.
        """
        seconds = _FAREWELL_SECONDS if error else self._rules.hang_seconds
        is_config = isinstance(error, ConfigError)  # it is raised in all processes
        text = str(error) if is_config else f"{type(error).__name__}: {error}"
        try:
            # The run may have ended before its first step. A server that fails before it comes fails in the run.
            self._shards.gather_late(seconds)
            self._status.enter("leaves", has_failed=error is not None)
            if error is None or tells:
                kind, fields = ("refused", {"text": text, "is_config": is_config}) if error else ("over", {})
                send_home(self._link, self._attendance, self._events, self._rules, kind, fields, self._shards.knows)
            self._shards.end(text if tells and is_config else "", seconds)
        finally:
            self._link.close()
            self._status.enter("over", has_failed=error is not None)

    def _hand_out(self) -> None:
        self._desk.drop_late()
        if len(self.ledger.workers) < self._rules.expected:
            return
        for attendee in self._attendance.waiting():
            job = self._job_for(attendee)
            if job is None:
                continue
            pulled, arrays = self._store.since(attendee.version)
            fields = {"number": job.number, "epoch": job.epoch, "begin": job.begin, "end": job.end, **pulled}
            fields["loss_scale"] = self._loss_scale.state() if self._loss_scale else None
            fields |= self._shards.pass_for(attendee.ticket, job.number)
            now = self._rules.now()  # before the worker can have the job
            self._link.send(attendee.peer, "job", fields, arrays)
            nbytes = sum(array.nbytes for array in arrays)
            self.ledger.servers[0].bytes_out += nbytes
            attendee.tally.pulled_bytes += nbytes
            attendee.tally.waited_seconds += 0.0 if attendee.waits_since is None else now - attendee.waits_since
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
        """Make the update from the gradients of these jobs, on all servers."""
        answers, pushes = self._desk.answers_to(jobs)
        for job in jobs:
            self.queue.use(job.number)
        update = ServedUpdate(jobs, answers, pushes, may_skip=self._loss_scale is not None)
        rate = 0.0
        if update.means.is_finite:
            rate = self._apply(update)
        else:
            self._shards.forget(*self.queue.numbers)
        if self._loss_scale:
            self._loss_scale.update(skipped=not update.means.is_finite)
        return update.means, rate

    def _apply(self, update: ServedUpdate) -> float:
        staleness = update.staleness(self._store.version)
        factor = 1 / max(1, *staleness) if self._rules.corrects_staleness else 1.0
        plan = self._store.plan(factor)
        known = {"version": self._store.version + 1, "plan": plan, "staleness": max(staleness)}
        with self._shards.together():
            self._shards.update(known, update, self.queue.numbers)
            rate = self._store.apply(update.gradients(), update.means.remarks, plan, max(staleness))
        self.ledger.updates += 1
        self.ledger.staleness.update(staleness)
        return rate
