"""WorkerRegistry: the connected workers, those that wait for a unit, the silent ones, and the refused ones."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.launch.conditions import unlike
from mpitrain.server.server_link import ENDED, ServerLink
from mpitrain.server.status import ServerStats, WorkerStats
from mpitrain.server.wire import Message, Peer
from mpitrain.server.work_units import ConsistencyMode, WorkQueue
from mpitrain.server.worker_link import Patience

# The number of characters of a peer's text that are kept, printed and sent.
MOST_SAID = 2000
_MOST_OF_NAME = 200


@dataclass
class Member:
    """A connected worker.

    Attributes:
        peer: the connection, by which the link and the mode know the worker.
        ticket: a random text, by which all servers know the worker.
        version: of the parameters that it has; -1: none.
        waits_since: when it began to wait for a unit; None: it does not wait.
        unit_since: when its unit was handed out.
        unit_clock: the same by WorkerRegistry.clock.
        is_overdue: its unit has not been answered for `hang_seconds`. The next free worker gets it.
        is_silent: its unit was taken away for that reason.
    """

    peer: Peer
    stats: WorkerStats
    version: int = -1
    waits_since: float | None = None
    unit_since: float = 0.0
    unit_clock: float = 0.0
    is_overdue: bool = False
    is_silent: bool = False
    ticket: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, kw_only=True)
class ServerRules(Patience):
    """The fixed settings of a running server. A unit without an answer for `hang_seconds` goes to another worker.

    Attributes:
        life: a random text; an answer to a unit of an earlier server has a different one.
        facts: lines that must be equal in every worker and the server.
        environment: code and packages, which workers must have too, from launch.served.environment_here; None: they are
            not compared.
        optimizer: class and settings, which other servers must have in common; "": there are none.
        secret: a secret of the servers, which workers do not have.
        corrects_staleness: the learning rate is divided by the staleness.
        expected: the number of workers that will certainly connect. The first units are handed out when all of them are
            connected, so that a run in mode "sync" is bitwise reproducible. At the end, each of them is told.
    """

    life: str
    facts: Sequence[str]
    environment: Mapping[str, Any] | None
    optimizer: str
    secret: str
    corrects_staleness: bool
    expected: int


class WorkerRegistry:
    """The workers of a Coordinator.

    Attributes:
        here: by their connections.
        stats: what they have done.
        stats_of: the same by their tickets, also of those that are gone.
        queue, mode, rules: of the server.
    """

    def __init__(self, link: ServerLink, queue: WorkQueue, mode: ConsistencyMode, rules: ServerRules) -> None:
        self.here: dict[Hashable, Member] = {}
        self.stats = ServerStats()
        self.stats_of: dict[str, WorkerStats] = {}
        self._link, self.queue, self.mode, self.rules = link, queue, mode, rules
        self._away_seconds = 0.0
        self._moved = self._said = self.clock()

    def clock(self) -> float:
        """The clock, in seconds, by which silence is measured. It stops while the server does other things."""
        return self.rules.now() - self._away_seconds

    def was_away(self, seconds: float) -> None:
        """Note that the server has read no messages for this time, because it did other things."""
        self._away_seconds += seconds

    def join(self, message: Message, ports: Sequence[int]) -> None:
        """Accept a worker, or refuse it. An already connected worker has lost the welcome or its unit, and begins
        again.

        `ports`: of the other servers.
        """
        fields, peer = message.fields, message.peer
        known = self.here.get(peer)
        number = len(self.stats.workers) + 1
        host = str(fields.get("host", ""))[:_MOST_OF_NAME]
        name = str(fields.get("name") or f"worker {number} on {host or 'an unknown host'}")[:_MOST_OF_NAME]
        environment = self.rules.environment
        problem = "" if environment is None else unlike(fields.get("environment"), environment)
        if problem := problem or difference(fields.get("facts"), self.rules.facts):
            problem = problem[:MOST_SAID]
            self.rules.say(f"{name} is refused: {problem}")
            remedy = (
                "a worker needs the script, packages, data and settings (MPITRAIN_COMPRESSION) with which the server "
                "was started"
            )
            self._link.send(peer, "refused", {"text": f"the server refuses {name}: {problem}; {remedy}"})
            return
        if known is not None:
            self.mode.leave(peer)
            known.version, known.waits_since = -1, None
            known.is_overdue = known.is_silent = False
        else:
            known = Member(peer, WorkerStats(name, host))
            self.stats.workers.append(known.stats)
            self.here[peer], self.stats_of[known.ticket] = known, known.stats
            self.rules.say(f"{name} has joined; {len(self.here)} here")
        self.mode.join(peer)
        told = {"life": self.rules.life, "name": known.stats.name, "ticket": known.ticket, "ports": list(ports)}
        self._link.send(peer, "welcome", told)

    def with_ticket(self, ticket: Any) -> Member | None:
        """Return the connected worker with this ticket."""
        return next((one for one in self.here.values() if one.ticket == ticket), None)

    def leave(self, peer: Hashable, why: str) -> None:
        """Remove a worker that is gone. Its unit goes to another one."""
        member = self.here.pop(peer, None)
        if member is None:
            return
        member.stats.is_here = False
        self.mode.leave(peer)
        self.rules.say(f"{member.stats.name} has gone ({why}); {len(self.here)} here")

    def dismiss(self, member: Member, problem: str) -> None:
        """Dismiss a worker that cannot be used."""
        problem = problem[:MOST_SAID]
        self._link.send(member.peer, "refused", {"text": f"the server dismisses {member.stats.name}: {problem}"})
        self.leave(member.peer, problem)

    def ask(self, member: Member, fields: Mapping[str, Any], newest: int) -> None:
        """Note that a worker asks for a unit. It repeats this while it waits, and so learns that the server is alive.

        Args:
            fields: of the message, with the version of the parameters that the worker has.
            newest: version.
        """
        version = fields.get("version")
        member.is_overdue = bool(self.queue.at(member.peer)) and member.is_overdue
        if member.is_silent:
            member.is_silent = False
            self.mode.join(member.peer)
        if member.waits_since is not None:
            self._link.send(member.peer, "wait", {})
        elif not self.queue.at(member.peer):
            member.waits_since = self.rules.now()
            member.version = version if isinstance(version, int) and version <= newest else -1

    def waiting(self) -> list[Member]:
        """Return the workers that wait for a unit, longest wait first."""
        waiting = [one for one in self.here.values() if one.waits_since is not None]
        return sorted(waiting, key=lambda one: one.waits_since or 0.0)

    def take_overdue(self) -> bool:
        """Take away the unit of the worker that has been silent for longest, for a free worker. False: none is
        silent."""
        overdue = [one for one in self.here.values() if one.is_overdue]
        if not overdue:
            return False
        longest = min(overdue, key=lambda one: one.unit_clock)
        longest.is_overdue, longest.is_silent = False, True
        self.mode.leave(longest.peer)
        return True

    def move(self) -> None:
        """Note that an answer has arrived."""
        self._moved = self.clock()

    @property
    def quiet_seconds(self) -> float:
        """For how long no answer has arrived although units are handed out."""
        return self.clock() - self._moved if self.queue.out() else 0.0

    def look_at_the_clock(self, silent_servers: Sequence[str] = ()) -> None:
        """Note the overdue units, which other workers may get, and print for whom the server waits.

        Args:
            silent_servers: the further servers that do not answer. They may be the reason that workers are late.
        """
        now, rules = self.clock(), self.rules
        out = self.queue.out()
        for member in self.here.values():
            unit = out.get(member.peer)
            if member.is_overdue or not rules.hang_seconds or unit is None or silent_servers:
                continue
            seconds = now - member.unit_clock
            if seconds > rules.hang_seconds:
                member.is_overdue = True
                rules.say(
                    f"{member.stats.name} has not answered work unit {unit.number} for {seconds:.0f} s; the next "
                    "worker that is free gets its samples"
                )
        if now - max(self._moved, self._said) < rules.stall_seconds:
            return
        self._said = now
        busy = [one.stats.name for one in self.here.values() if one.peer in out]
        if not self.here:
            rules.say("there is no worker; the server waits for some")
        elif busy:
            waits_for = ", ".join(silent_servers or busy)
            rules.say(f"no answer for {now - self._moved:.0f} s; the server waits for {waits_for}")


def difference(given: Any, expected: Sequence[str]) -> str:
    """Return the first difference between what a peer and the server train; "" if there is none."""
    if not isinstance(given, list):
        return "it does not report what it trains; does it have the server's version of mpitrain?"
    for line, own in zip(given, expected, strict=False):
        if line != own:
            return f"it has {str(line)[:300]!r}, the server {own!r}; start it with the server's script and arguments"
    if len(given) != len(expected):
        return f"it has {len(given)} lines of parameters and data, the server {len(expected)}"
    return ""


# The limit, however many peers are rejected, and however often.
_EVERY_SECONDS = 10.0


class RejectedPeers:
    """Counts peers with another key, and peers with the key that send no messages. Prints a line from time to time."""

    def __init__(self, link: ServerLink, say: Callable[[str], None], now: Callable[[], float]) -> None:
        self._link, self._say, self._now = link, say, now
        self._said, self._known, self._others = -math.inf, 0, 0
        self._why = ""

    def leave(self, why: str) -> None:
        """Note that a peer that had not joined is gone. Only one that was rejected counts."""
        if why != ENDED:
            self._others, self._why = self._others + 1, why

    def look(self) -> None:
        """Print what has not been reported yet, unless a line was printed in the last seconds."""
        keys = self._link.refused - self._known
        if not (keys or self._others) or self._now() - self._said < _EVERY_SECONDS:
            return
        self._said = self._now()
        if keys:
            self._say(
                f"refused, because they have another key: {keys} connections, at last one from "
                f"{self._link.refused_from}; a worker needs the line that this server has printed"
            )
        if self._others:
            self._say(f"refused, before they had joined: {self._others}; the last one because {self._why}")
        self._known, self._others = self._link.refused, 0
