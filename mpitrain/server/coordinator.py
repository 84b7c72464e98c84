"""The coordinator is the first server: it hands out work units, decides which answers count, and makes updates.

worker:  hello ─> welcome    next ─> unit + parameters   done + gradients ─> unit + parameters ...   ─> over

It has one thread and one loop, and no MPI. With several servers, only the coordinator decides; the others
(server.shard) have parts of the parameters, and follow its commands (server.shards).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.errors import ConfigError, GradientError, NonFiniteError
from mpitrain.reducer.means import Means, Overlap, remarks_of
from mpitrain.server.gradients import Answer, read_answer
from mpitrain.server.parameters import ParameterShard
from mpitrain.server.registry import MOST_SAID, Member, ServerRules, WorkerRegistry
from mpitrain.server.server_link import Disconnected, Event, ServerLink
from mpitrain.server.shards import Shards
from mpitrain.server.status import ByteCounts, ServerStatus
from mpitrain.server.wire import number_in
from mpitrain.server.work_units import ConsistencyMode, Places, WorkQueue, WorkUnit

# The longest time without a look at the clock.
_LOOK_SECONDS = 0.5
# How long other servers are waited for after an error.
_SERVERS_SECONDS = 5.0
# Waiting workers answer at once when they are told that the run is over.
_SHUTDOWN_SECONDS = 5.0
# The number of failing workers from which the samples, or the model, must be at fault.
_MOST_FAILURES = 3


@dataclass
class AnswerParts:
    """The parts of the answer to a unit that have arrived.

    Attributes:
        ticket: of its worker.
        answer: the worker's report; None: it has not arrived.
        not_finite: by server whose part has arrived: the first parameter with NaN or infinity, or "".
    """

    ticket: str
    answer: Answer | None = None
    not_finite: dict[int, str] = field(default_factory=dict)

    @property
    def first_not_finite(self) -> str:
        """The first parameter with NaN or infinity; "": all gradients that have arrived are finite."""
        return next(filter(None, (self.not_finite[server] for server in sorted(self.not_finite))), "")


class Answers:
    """Receives answers, whole or in parts. Refuses those that cannot be used, and counts them by samples and worker.

    With several servers each gets a part of the gradients. An answer counts when all of them have their part.
    """

    def __init__(self, shards: Shards, registry: WorkerRegistry, *, may_skip: bool) -> None:
        """`may_skip`: there is a loss scale, which may have made gradients infinite."""
        self._shards, self._own, self._registry, self._may_skip = shards, shards.own, registry, may_skip
        self._queue, self._mode, self._rules = registry.queue, registry.mode, registry.rules
        self._parts: dict[int, AnswerParts] = {}  # that no update has used yet, by the number of the unit
        self._failed: dict[Places, list[Hashable]] = {}  # the workers that could not compute these samples
        self._in_a_row: dict[Hashable, int] = {}  # failures by worker

    def done(
        self, member: Member, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]
    ) -> Sequence[WorkUnit] | None:
        """Receive a worker's report and the first server's part of its gradients. It also asks for its next unit.

        Return the units whose gradients make an update, if they do.
        """
        number, own = number_in(fields, "number"), self._own
        nbytes = sum(array.nbytes for array in arrays)
        self._registry.stats.servers[0].bytes_in += nbytes
        member.stats.pushed_bytes += nbytes
        unit = self._queue.find(number, member.peer)
        if unit is None:  # the unit was given to another worker, or is no longer needed
            self._registry.ask(member, fields, own.version)
            member.stats.dropped += 1
            return None
        try:
            answer = read_answer(fields, len(own.layout.parameters))
            own.check_note(answer.told[1])
            if not 0 <= answer.version <= own.version:
                raise GradientError(f"gradients of version {answer.version} came; the newest is {own.version}")
            not_finite = self._own.push(member.ticket, number, arrays)
        except GradientError as error:
            self._send_away(member, unit, str(error))
            return None
        self._parts.setdefault(number, AnswerParts(member.ticket)).answer = answer
        return self._add(member, unit, 0, not_finite)

    def have(self, server: int, fields: Mapping[str, Any]) -> Sequence[WorkUnit] | None:
        """Receive another server's report about its part of an answer. Return as `done`."""
        self._registry.stats_of[fields["ticket"]].pushed_bytes += fields["pushed_bytes"]
        member = self._registry.with_ticket(fields["ticket"])
        if member is None or (unit := self._queue.find(fields["number"], member.peer)) is None:
            return None
        if fields["problem"]:
            self._send_away(member, unit, fields["problem"])
            return None
        return self._add(member, unit, server, fields["not_finite"])

    def failed(self, member: Member, fields: Mapping[str, Any]) -> None:
        """Note that a worker could not compute the gradients of its unit. The worker ends by itself.

        Raises:
            GradientError: see `_refuse`.
        """
        unit = self._queue.answer(number_in(fields, "number"), member.peer)
        if unit is not None:
            self._refuse(member, unit, GradientError, str(fields.get("text"))[:MOST_SAID])

    def take(self, units: Sequence[WorkUnit]) -> tuple[list[AnswerParts], list[Answer]]:
        """Remove the answers to these units, and return them."""
        parts = [self._parts.pop(unit.number) for unit in units]
        return parts, [part.answer for part in parts if part.answer]

    def drop_late(self) -> None:
        """Drop the answers to units that are over, or that another worker has. Their senders wait for their next
        unit."""
        for number in [number for number in self._parts if not self._queue.has(number)]:
            parts = self._parts.pop(number)
            member = self._registry.with_ticket(parts.ticket)
            if member is not None and parts.answer and len(parts.not_finite) <= self._shards.num:
                self._registry.ask(member, {"version": parts.answer.version}, self._own.version)
                member.stats.dropped += 1

    def _add(self, member: Member, unit: WorkUnit, server: int, not_finite: str) -> Sequence[WorkUnit] | None:
        """Add a part of an answer. Return as `done`, if all servers have their parts of it."""
        parts = self._parts.setdefault(unit.number, AnswerParts(member.ticket))
        parts.not_finite[server] = not_finite
        answer = parts.answer
        if answer is None or len(parts.not_finite) <= self._shards.num:
            return None
        answered = self._queue.answer(unit.number, member.peer)
        assert answered is not None
        self._registry.move()
        self._registry.ask(member, {"version": answer.version}, self._own.version)
        first = parts.first_not_finite
        if not (self._may_skip and answer.scale > 1) and (first or not math.isfinite(answer.loss)):
            where = f"{first} holds" if first else "the loss is"
            self._refuse(member, answered, NonFiniteError, f"{where} NaN or infinity")
            return None
        self._failed.pop(answered.places, None)
        self._in_a_row.pop(member.peer, None)
        member.stats.units += 1
        member.stats.samples += answered.samples
        member.stats.seconds += self._rules.now() - member.unit_since
        return self._mode.answer(answered)

    def _send_away(self, member: Member, unit: WorkUnit, problem: str) -> None:
        """Dismiss a worker whose answer does not belong to this model. Its unit goes to another one."""
        self._registry.move()
        self._mode.refuse(unit)
        member.stats.refused += 1
        self._registry.dismiss(member, problem)

    def _refuse(self, member: Member, unit: WorkUnit, kind: type[GradientError], problem: str) -> None:
        """Let other workers try a unit. A worker that fails three times in a row is dismissed.

        Raises:
            GradientError (an error of the given class): so many have failed that the samples or the model must be at
                fault.
        """
        member.stats.refused += 1
        self._mode.refuse(unit)
        self._shards.forget(*self._queue.live)
        text = (
            f"{member.stats.name}, work unit {unit.number} (epoch {unit.epoch}, places {unit.begin} to {unit.end}): "
            f"{problem}"
        )
        self._rules.say(f"refused: {text}")
        tried, num_here = self._failed.setdefault(unit.places, []), len(self._registry.here)
        tried.append(member.peer)
        self._in_a_row[member.peer] = self._in_a_row.get(member.peer, 0) + 1
        failed = ""
        if len(set(tried)) >= _MOST_FAILURES:
            failed = f"{len(set(tried))} workers"
        elif num_here < _MOST_FAILURES <= len(tried):
            failed = f"{len(tried)} attempts of {num_here} workers"
        if failed:
            raise kind(
                f"{text}; {failed} could not compute these samples, and nothing was changed by them. Try a smaller "
                "learning rate or gradient clipping, or examine the samples"
            )
        if num_here > 1 and self._in_a_row[member.peer] >= _MOST_FAILURES:
            self._registry.dismiss(member, f"{problem}, for the third time in a row")


class Coordinator:
    """Makes updates from the gradients of workers.

    Attributes:
        queue: the position in the data.
        stats: the statistics so far.
    """

    def __init__(
        self,
        link: ServerLink,
        own: ParameterShard,
        queue: WorkQueue,
        mode: ConsistencyMode,
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
        self._link, self._own, self._rules = link, own, rules
        self._loss_scale = adapter.loss_scale
        self._registry = WorkerRegistry(link, queue, mode, rules)
        self.stats = self._registry.stats
        self.stats.servers = [ByteCounts() for _ in range(num_servers)]
        self._events: deque[Event] = deque()
        self._shards = Shards(link, self._events, adapter, own, rules, self.stats.servers, host)
        self._may_skip = self._loss_scale is not None
        self._answers = Answers(self._shards, self._registry, may_skip=self._may_skip)
        self._status = ServerStatus(self._registry, self._shards.parts)
        self._has_begun, self._carried = False, carried or {}
        self._left: float | None = None  # when the last update was complete

    def next_update(self) -> tuple[Means, float]:
        """Wait until workers have sent what makes the next update, and make it. Return the means and the learning rate.

        Raises:
            GradientError: several workers have sent unusable gradients for the same samples.
            LaunchError: another server is gone.
        """
        if not self._has_begun:
            self._has_begun = True
            self._shards.gather()
            self._shards.begin(self._carried)
            self._carried = {}
        self._shards.note_changes()
        if self._left is not None:
            self._registry.was_away(self._rules.now() - self._left)
        while True:
            self._hand_out()
            self._status.show()
            if not self._events:
                self._events.extend(self._link.receive(_LOOK_SECONDS))
                silent = self._shards.look(self._registry.clock(), self._registry.quiet_seconds)
                self._registry.look_at_the_clock(silent)
                self._shards.rejected_peers.look()
            while self._events:
                if units := self._take(self._events.popleft()):
                    made = self._update(units)
                    self._left = self._rules.now()
                    return made

    def fetch(self) -> None:
        """Copy the parameters and the optimizer's state of all servers into this server's model.

        Raises:
            LaunchError: another server is gone.
        """
        self._shards.fetch()

    def close(self, error: BaseException | None, *, tells: bool) -> None:
        """Close the link. Tell all workers that the run is over, or that `error` has ended it.

        Args:
            error: the error that ended the run; None: the run is over.
            tells: workers are told of the error, and end. Otherwise they wait until the server is back.
        """
        seconds = _SERVERS_SECONDS if error else self._rules.hang_seconds
        is_config = isinstance(error, ConfigError)  # it is raised in all processes
        text = str(error) if is_config else f"{type(error).__name__}: {error}"
        try:
            # The run may have ended before its first step. A server that fails before it connects fails in the run.
            self._shards.gather_late(seconds)
            self._status.enter("leaves", has_failed=error is not None)
            if error is None or tells:
                kind, fields = ("refused", {"text": text, "is_config": is_config}) if error else ("over", {})
                self._shut_down_workers(kind, fields)
            self._shards.end(text if tells and is_config else "", seconds)
        finally:
            self._link.close()
            self._status.enter("over", has_failed=error is not None)

    # -- work units and answers -----------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        self._answers.drop_late()
        if len(self.stats.workers) < self._rules.expected:
            return
        for member in self._registry.waiting():
            unit = self._unit_for(member)
            if unit is None:
                continue
            pulled, arrays = self._own.since(member.version)
            fields = {"number": unit.number, "epoch": unit.epoch, "begin": unit.begin, "end": unit.end, **pulled}
            fields["loss_scale"] = self._loss_scale.state() if self._loss_scale else None
            fields |= self._shards.token_for(member.ticket, unit.number)
            now = self._rules.now()  # before the worker can have the unit
            self._link.send(member.peer, "unit", fields, arrays)
            nbytes = sum(array.nbytes for array in arrays)
            self.stats.servers[0].bytes_out += nbytes
            member.stats.pulled_bytes += nbytes
            member.stats.waited_seconds += 0.0 if member.waits_since is None else now - member.waits_since
            member.waits_since, member.unit_since = None, now
            member.unit_clock = self._registry.clock()

    def _unit_for(self, member: Member) -> WorkUnit | None:
        """Return a unit for a free worker, preferably one that another worker has not answered in time."""
        while True:
            has_taken = self._registry.take_overdue()
            unit = self._registry.mode.next_unit(member.peer)
            if unit is not None or not has_taken:
                return unit

    def _take(self, event: Event) -> Sequence[WorkUnit] | None:
        """Handle an event. Return the units whose gradients make an update, if they do."""
        if self._shards.knows(event.peer):
            return self._hear_server(event)
        member = self._registry.here.get(event.peer)
        if isinstance(event, Disconnected) or event.kind in ("hello", "bye"):
            self._come_or_go(event)
        elif member is None or event.fields.get("life") != self._rules.life:
            self._link.send(event.peer, "again", {})
        elif event.kind == "next":
            self._registry.ask(member, event.fields, self._own.version)
        elif event.kind == "failed":
            self._answers.failed(member, event.fields)
        elif event.kind == "done":
            return self._answers.done(member, event.fields, event.arrays)
        else:
            problem = f"a message of kind {event.kind[:100]!r} came; allowed are hello, next, done, failed and bye"
            self._registry.dismiss(member, problem)
        return None

    def _come_or_go(self, event: Event) -> None:
        if isinstance(event, Disconnected):
            if event.peer not in self._registry.here:
                self._shards.rejected_peers.leave(event.why)
            self._registry.leave(event.peer, event.why)
        elif event.kind == "hello":
            self._registry.join(event, self._shards.ports)
        else:
            self._registry.leave(event.peer, "it has ended")
        self._shards.forget(*self.queue.live)  # the parts of its unit that the worker has sent them

    def _hear_server(self, event: Event) -> Sequence[WorkUnit] | None:
        """Handle a message of another server: parts sent to a worker, its part of an answer, or its loss."""
        if isinstance(event, Disconnected):
            self._shards.lose(event.peer, event.why)
        number = self._shards.heard(event)
        if event.kind == "pulled":
            self._registry.stats_of[event.fields["ticket"]].pulled_bytes += event.fields["pulled_bytes"]
        return self._answers.have(number, event.fields) if event.kind == "have" else None

    def _update(self, units: Sequence[WorkUnit]) -> tuple[Means, float]:
        """Make the update from the gradients of these units, on all servers, unless the loss scale skips it."""
        parts, answers = self._answers.take(units)
        for unit in units:
            self.queue.use(unit.number)
        told = [answer.told for answer in answers]
        total = sum(unit.samples for unit in units)
        loss = sum(unit.samples * answer.loss for unit, answer in zip(units, answers, strict=True)) / total
        is_finite = not (self._may_skip and any(part.first_not_finite for part in parts))
        cause = None if is_finite else NonFiniteError("the loss scale made a gradient infinite")
        means = Means(loss, total, Overlap(0.0, 0.0, 0.0), cause, remarks_of(told))
        rate = 0.0
        if is_finite:
            # The weights of the gradients in their mean over all samples, without the loss scales.
            gradients = [
                (part.ticket, unit.number, unit.samples / total / answer.scale)
                for unit, part, answer in zip(units, parts, answers, strict=True)
            ]
            staleness = [self._own.version - answer.version for answer in answers]
            factor = 1 / max(1, *staleness) if self._rules.corrects_staleness else 1.0
            rate = self._shards.update(gradients, told, factor, max(staleness), *self.queue.live)
            self.stats.updates += 1
            self.stats.staleness.update(staleness)
        else:
            self._shards.forget(*self.queue.live)
        if self._loss_scale:
            self._loss_scale.update(skipped=not is_finite)
        return means, rate

    # -- the end --------------------------------------------------------------------------------------------------

    def _shut_down_workers(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Tell all workers, including those that connect now, that the run has ended. Wait briefly until they leave.

        A worker that is still computing reads the message after it has sent its answer. Unread messages are lost with
        the connection, so the connection stays open for `hang_seconds`, or until the worker has left.

        Args:
            kind, fields: of the message that reports it.
        """
        rules, here = self._rules, self._registry.here
        for member in here.values():
            self._link.send(member.peer, kind, fields)
        told, left = set(here), set[object]()
        busy = {member.peer: member.stats.name for member in here.values() if member.waits_since is None}
        begun = said = rules.now()
        missing = rules.expected - len(self.stats.workers)
        while told - left or len(told) - len(here) < missing:
            now = rules.now()
            patience = rules.hang_seconds if rules.expected or busy else _SHUTDOWN_SECONDS
            if patience and now - begun > patience:
                return
            if busy and now - said >= rules.stall_seconds:
                rules.say(f"the run has ended; the server waits for {', '.join(busy.values())} to read of it")
                said = now
            come = [*self._events, *self._link.receive(_LOOK_SECONDS)]
            self._events.clear()
            for event in come:
                if self._shards.knows(event.peer):
                    self._events.append(event)
                    continue
                if busy.pop(event.peer, None) and not busy:
                    begun = rules.now()  # the last one has read the message by now, or is about to
                if isinstance(event, Disconnected) or event.kind == "bye":
                    left.add(event.peer)
                elif event.peer not in told:
                    told.add(event.peer)
                    self._link.send(event.peer, kind, fields)
