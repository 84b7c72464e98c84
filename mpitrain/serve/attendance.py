"""Attendance: which workers are here, who waits for a job, who is silent, and who is sent away."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.compression.codec import Codec
from mpitrain.launch.compare import unlike
from mpitrain.serve.jobs import JobQueue
from mpitrain.serve.ledger import ServerLedger, WorkerTally
from mpitrain.serve.link import ServerLink
from mpitrain.serve.pace import JobPace
from mpitrain.serve.wire import Message, Peer

# In characters: of what a peer has said, this much is kept, printed and sent.
MOST_SAID = 2000
_MOST_OF_NAME = 200


@dataclass
class Attendee:
    """A worker that is here.

    Attributes:
        peer: the connection, by which the link and the pace know the worker.
        ticket: a random text, by which all servers know the worker.
        version: of the parameters that it has; -1: none.
        waits_since: since when it waits for a job; None: it does not.
        job_since: when its job went out.
        job_clock: the same by Attendance.clock.
        is_overdue: its job has not been answered for `hang_seconds`. The next worker that is free gets it.
        is_silent: its job was taken away for that.
    """

    peer: Peer
    tally: WorkerTally
    version: int = -1
    waits_since: float | None = None
    job_since: float = 0.0
    job_clock: float = 0.0
    is_overdue: bool = False
    is_silent: bool = False
    ticket: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class ServerRules:
    """What does not change while a server runs.

    Attributes:
        life: a random text: an answer to a job of an earlier server has another one.
        facts: what every worker must have in common with the server, in lines.
        environment: code and packages, which workers must have too, from launch.served.environment_here; None: they are
            not compared.
        optimizer: class and settings, which other servers must have in common; "": there are none.
        secret: which other servers must have, and workers have not.
        codec: of gradients.
        corrects_staleness: the learning rate is divided by the staleness.
        stall_seconds: after so long without an answer, a line says who is waited for.
        hang_seconds: a job without an answer for so long goes to the next worker that is free; 0: never.
        expected: the number of workers that will surely come. The first jobs go out when they are here, so that a run
            in mode "sync" has the same bits each time. At the end, each of them is told.
        say: prints a line.
        now: the clock, in seconds.
    """

    life: str
    facts: Sequence[str]
    environment: Mapping[str, Any] | None
    optimizer: str
    secret: str
    codec: Codec | None
    corrects_staleness: bool
    stall_seconds: float
    hang_seconds: float
    expected: int
    say: Callable[[str], None]
    now: Callable[[], float] = field(default=time.monotonic)


class Attendance:
    """The workers of a JobServer.

    Attributes:
        here: by their connections.
        ledger: what they have done.
        tallies: the same by their tickets, also of those that are gone.
    """

    def __init__(self, link: ServerLink, queue: JobQueue, pace: JobPace, rules: ServerRules) -> None:
        self.here: dict[Hashable, Attendee] = {}
        self.ledger = ServerLedger()
        self.tallies: dict[str, WorkerTally] = {}
        self._link, self._queue, self._pace, self._rules = link, queue, pace, rules
        self._away_seconds = 0.0
        self._moved = self._said = self.clock()

    def clock(self) -> float:
        """The time by which silence is measured, in seconds. It stands still while the server does other things."""
        return self._rules.now() - self._away_seconds

    def was_away(self, seconds: float) -> None:
        """Take in that the server has read no messages for so long, because it did other things."""
        self._away_seconds += seconds

    def join(self, message: Message, ports: Sequence[int]) -> None:
        """Take in a worker, or refuse it. A worker that is here has lost the welcome, or its job, and begins again.

        `ports`: of the other servers.
        """
        fields, peer = message.fields, message.peer
        known = self.here.get(peer)
        number = len(self.ledger.workers) + 1
        host = str(fields.get("host", ""))[:_MOST_OF_NAME]
        name = str(fields.get("name") or f"worker {number} on {host or 'an unknown host'}")[:_MOST_OF_NAME]
        environment = self._rules.environment
        problem = "" if environment is None else unlike(fields.get("environment"), environment)
        if problem := problem or difference(fields.get("facts"), self._rules.facts):
            problem = problem[:MOST_SAID]
            self._rules.say(f"{name} is refused: {problem}")
            remedy = (
                "a worker needs the script, packages, data and settings (MPITRAIN_COMPRESSION) with which the server "
                "was started"
            )
            self._link.send(peer, "refused", {"text": f"the server refuses {name}: {problem}; {remedy}"})
            return
        if known is not None:
            self._pace.leave(peer)
            known.version, known.waits_since = -1, None
            known.is_overdue = known.is_silent = False
        else:
            known = Attendee(peer, WorkerTally(name, host))
            self.ledger.workers.append(known.tally)
            self.here[peer], self.tallies[known.ticket] = known, known.tally
            self._rules.say(f"{name} has joined; {len(self.here)} here")
        self._pace.join(peer)
        told = {"life": self._rules.life, "name": known.tally.name, "ticket": known.ticket, "ports": list(ports)}
        self._link.send(peer, "welcome", told)

    def with_ticket(self, ticket: Any) -> Attendee | None:
        """Return the worker that is here and has this ticket."""
        return next((one for one in self.here.values() if one.ticket == ticket), None)

    def leave(self, peer: Hashable, why: str) -> None:
        """Take in that a worker is gone. Its job goes to another one."""
        attendee = self.here.pop(peer, None)
        if attendee is None:
            return
        attendee.tally.is_here = False
        self._pace.leave(peer)
        self._rules.say(f"{attendee.tally.name} has gone ({why}); {len(self.here)} here")

    def dismiss(self, attendee: Attendee, problem: str) -> None:
        """End a worker that cannot be worked with."""
        problem = problem[:MOST_SAID]
        self._link.send(attendee.peer, "refused", {"text": f"the server dismisses {attendee.tally.name}: {problem}"})
        self.leave(attendee.peer, problem)

    def ask(self, attendee: Attendee, fields: Mapping[str, Any], newest: int) -> None:
        """Take in that a worker asks for a job. It repeats that while it waits, and learns that the server is there.

        Args:
            fields: of the message, with the version of the parameters that the worker has.
            newest: version.
        """
        version = fields.get("version")
        attendee.is_overdue = bool(self._queue.at(attendee.peer)) and attendee.is_overdue
        if attendee.is_silent:
            attendee.is_silent = False
            self._pace.join(attendee.peer)
        if attendee.waits_since is not None:
            self._link.send(attendee.peer, "wait", {})
        elif not self._queue.at(attendee.peer):
            attendee.waits_since = self._rules.now()
            attendee.version = version if isinstance(version, int) and version <= newest else -1

    def waiting(self) -> list[Attendee]:
        """Return the workers that wait for a job, those first that have waited longest."""
        waiting = [one for one in self.here.values() if one.waits_since is not None]
        return sorted(waiting, key=lambda one: one.waits_since or 0.0)

    def take_overdue(self) -> bool:
        """Take the job of the worker that is silent for longest, for one that is free. False: nobody is silent."""
        overdue = [one for one in self.here.values() if one.is_overdue]
        if not overdue:
            return False
        longest = min(overdue, key=lambda one: one.job_clock)
        longest.is_overdue, longest.is_silent = False, True
        self._pace.leave(longest.peer)
        return True

    def move(self) -> None:
        """Take in that an answer has come."""
        self._moved = self.clock()

    @property
    def quiet_seconds(self) -> float:
        """For how long no answer has come although jobs are out."""
        return self.clock() - self._moved if self._queue.out() else 0.0

    def look_at_the_clock(self, silent_servers: Sequence[str] = ()) -> None:
        """Note whose jobs others may have, and say for whom the server waits.

        Args:
            silent_servers: those of the further servers that do not answer. What workers have not done by now, these
                may hold up.
        """
        now, rules = self.clock(), self._rules
        out = self._queue.out()
        for attendee in self.here.values():
            job = out.get(attendee.peer)
            if attendee.is_overdue or not rules.hang_seconds or job is None or silent_servers:
                continue
            if now - attendee.job_clock > rules.hang_seconds:
                attendee.is_overdue = True
                rules.say(
                    f"{attendee.tally.name} has not answered job {job.number} for {now - attendee.job_clock:.0f} s; "
                    "the next worker that is free gets its samples"
                )
        if now - max(self._moved, self._said) < rules.stall_seconds:
            return
        self._said = now
        busy = [one.tally.name for one in self.here.values() if one.peer in out]
        if not self.here:
            rules.say("there is no worker; the server waits for some")
        elif busy:
            waits_for = ", ".join(silent_servers or busy)
            rules.say(f"no answer for {now - self._moved:.0f} s; the server waits for {waits_for}")


def difference(given: Any, expected: Sequence[str]) -> str:
    """Return the first difference between what a peer and the server train; "" if there is none."""
    if not isinstance(given, list):
        return "it does not say what it trains; is its version of mpitrain the server's?"
    for line, own in zip(given, expected, strict=False):
        if line != own:
            return f"it has {str(line)[:300]!r}, the server {own!r}; start it with the server's script and arguments"
    if len(given) != len(expected):
        return f"it has {len(given)} lines of parameters and data, the server {len(expected)}"
    return ""
