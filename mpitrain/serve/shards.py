"""The further servers of a job, as the first one directs them.

    first server:       pieces, settle ─> update, update, forget, update ... fetch ─>     ... over
    shard:       shard ─>              have (a part of an answer) ...          ─> pieces, state ─> bye

All shards get the same messages in the same order, so they have the same versions. Each has the whole model, and
updates its part. Where hooks read the model, the first server fetches the parts; what hooks change goes back.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import numpy

from mpitrain.adapters.adapter import Adapter, divided_of
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.exchange.division import line_of
from mpitrain.serve.answers import Answer
from mpitrain.serve.attendance import ServerRules, difference
from mpitrain.serve.jobs import ServedJob
from mpitrain.serve.ledger import ServerTally
from mpitrain.serve.link import Event, Gone, ServerLink
from mpitrain.serve.passes import make_secret, pass_of
from mpitrain.serve.pieces import add_piece, difference_of, pieces_of
from mpitrain.serve.pushes import plain_told
from mpitrain.serve.shard_roll import RollOfShards
from mpitrain.serve.store import divisions_of
from mpitrain.serve.wire import Message, Peer

_LOOK_SECONDS = 0.5

# What is new, by server: values by name, and names that are gone.
Changes: TypeAlias = Mapping[int, tuple[Mapping[str, Any], Sequence[str]]]


class LostServerError(LaunchError):
    """A further server is gone, and its part of the parameters with it."""


class Shards:
    """Directs the further servers; there may be none.

    Attributes:
        num: how many there are.
        is_apart: an error has come before all servers had done the same, or one of them is gone.
    """

    def __init__(
        self,
        link: ServerLink,
        events: deque[Event],
        adapter: Adapter,
        rules: ServerRules,
        tallies: list[ServerTally],
        host: str,
    ) -> None:
        """
        Args:
            events: what comes from others in a wait for shards is added here.
            tallies: of all servers; those of the shards are kept up to date here.
            host: of the first server, with its rank if it has one.
        """
        self.num, self.is_apart = len(tallies) - 1, False
        self._link, self._events, self._rules = link, events, rules
        self._tallies, self._host = tallies, host
        self._gradients, self._parameters = divisions_of(adapter, len(tallies))
        self._peers: dict[Peer, int] = {}
        self._names: dict[int, str] = {}
        self._secret = make_secret()
        self._adapter = adapter
        self._version = -1  # that was told last
        self._is_fetched = False
        self._pieces: dict[int, dict[str, Any]] = {}  # those that have come, by server and name
        self._roll = RollOfShards(link)
        self._fetched: dict[int, dict[str, Any]] = {}  # as they came, to see what is changed here
        if self.num:
            divided_of(adapter).update_only(0, len(tallies), self._norm_of_all)

    def knows(self, peer: Hashable) -> bool:
        """Whether a peer is one of these servers."""
        return peer in self._peers

    def heard(self, message: Message) -> int:
        """Take in that a message has come from one of the servers. Return its number."""
        number = self._peers[message.peer]
        if "tally" in message.fields:
            self._tallies[number] = ServerTally(**message.fields["tally"])
        return number

    def gather(self) -> None:
        """Wait until all servers are here.

        Raises:
            LaunchError: one of them is gone, or does not come.
            ConfigError: one of them trains something else.
        """
        self._wait("shard", self._absent(), "to come")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all servers do the same.

        Raises:
            LaunchError: `is_apart`.
        """
        if self.is_apart:
            raise LostServerError(
                f"server 0 on {self._host} has old parts of the model: another server is gone, or an error has come "
                "before all of them had done the same. Start the job again: it goes on from the newest checkpoint"
            )
        self.is_apart = True
        yield
        self.is_apart = False

    def begin(self, version: int, carried: Mapping[numpy.dtype, numpy.ndarray]) -> None:
        """Give all servers the parameters, the optimizer's state, and what is carried. `gather` comes before."""
        if not self.num:
            return
        names = [f"server 0 on {self._host}", *(self._names[number] for number in range(1, self.num + 1))]
        self._rules.say(line_of(self._parameters, names))
        for peer, number in self._peers.items():
            parts = [flat[self._gradients.parts[number][dtype]] for dtype, flat in carried.items()]
            self._link.send(peer, "carry", {"secret": self._secret}, parts)
        self.settle(version, {number: (self._part(number), []) for number in self._peers.values()})

    def update(
        self,
        known: Mapping[str, Any],
        jobs: Sequence[ServedJob],
        answers: Sequence[Answer],
        shares: Sequence[float],
        numbers: tuple[int, Sequence[int]],
    ) -> None:
        """Tell all servers of an update.

        Args:
            known: its version, its plan, and its staleness.
            jobs, answers, shares: the gradients and their weights, in the order in which they are added up.
            numbers: as for `forget`.
        """
        if not self.num:
            return
        # Each of its own, so that the notes of any number of workers are never too long for a message.
        distinct: dict[str, int] = {}
        for answer in answers:
            if answer.push and (text := json.dumps(plain_told(answer.push.told))) not in distinct:
                distinct[text] = len(distinct)
                self._tell("told", {"told": plain_told(answer.push.told)})
        fields = {
            **known,
            "answers": [[answer.ticket, job.number] for job, answer in zip(jobs, answers, strict=True)],
            "told": [distinct[json.dumps(plain_told(answer.push.told))] for answer in answers if answer.push],
            "shares": list(shares),
            **_numbers(*numbers),
        }
        self._tell("update", fields)
        self._version, self._is_fetched = known["version"], False

    def forget(self, newest: int, live: Sequence[int]) -> None:
        """Let all servers drop the answers to jobs with a number up to `newest`, but for those that are `live`."""
        self._tell("forget", _numbers(newest, live))

    def pass_for(self, ticket: str, number: int) -> dict[str, str]:
        """Return what shows these servers that a worker has a job: its field "pass"."""
        return {"pass": pass_of(self._secret, ticket, number)} if self.num else {}

    def fetch(self) -> None:
        """Bring the parameters and the optimizer's state of all servers into the model of this one.

        Raises:
            LaunchError: a server is gone, or does not answer, or `is_apart`.
        """
        if not self.num or self._version < 0 or self._is_fetched:
            return
        with self.together():
            self._pieces = {number: {} for number in self._peers.values()}
            self._tell("fetch", {})
            self._wait("state", self._peers.values(), "for its part of the model")
            for number, state in self._pieces.items():
                gone = [name for name in self._part(number) if name not in state]
                divided_of(self._adapter).take_part_state(number, state, gone)
            self._fetched, self._is_fetched = self._pieces, True

    def changes(self) -> Changes:
        """Return what has been changed here since `fetch`."""
        differences = {number: difference_of(state, self._part(number)) for number, state in self._fetched.items()}
        self._fetched, self._is_fetched = {}, False
        return {number: (changed, gone) for number, (changed, gone) in differences.items() if changed or gone}

    def settle(self, version: int, changes: Changes) -> None:
        """Give the servers what has been changed here, and tell them the version, unless they know it."""
        if not changes and version == self._version:
            return
        with self.together():
            for peer, number in self._peers.items():
                changed, gone = changes.get(number, ({}, []))
                for fields, arrays in pieces_of(changed):
                    self._link.send(peer, "piece", fields, arrays)
                self._link.send(peer, "settle", {"version": version, "life": self._rules.life, "gone": gone})
            self._version = version

    def gather_late(self, seconds: float) -> None:
        """Wait up to `seconds` for servers that have not come until the run ends; 0: without end."""
        self._try_to_wait("shard", self._absent(), "to come", seconds)

    def end(self, problem: str, seconds: float) -> None:
        """Send the servers home, when no worker needs them any more. The run has ended, so it does not fail here.

        Args:
            problem: for an error of each of them; "": they end with exit code 0.
            seconds: they are waited for so long; 0: without end.
        """
        self._tell("over", {"problem": problem})
        self._try_to_wait("bye", self._peers.values(), "to end", seconds)

    def lose(self, peer: Peer, why: str) -> NoReturn:
        """Take in that one of the servers is gone.

        Raises:
            LaunchError: always.
        """
        self.is_apart = True
        name = self._names[self._peers.pop(peer)]
        raise LostServerError(
            f"{name} is gone ({why}), and its part of the parameters with it. Start the job again: it goes on from the "
            "newest checkpoint"
        )

    def look(self, now: float, quiet_seconds: float) -> list[str]:
        """While no answer comes, see whether these servers answer. Return the names of those that do not.

        Args:
            now: by the clock of the Attendance.
            quiet_seconds: for which no answer has come although jobs are out.

        Raises:
            LaunchError: one of them has not answered for `hang_seconds`.
        """
        silent = self._roll.look(self._peers, now, quiet_seconds)
        for number, seconds in silent.items():
            if self._rules.hang_seconds and seconds > self._rules.hang_seconds:
                self.is_apart = True
                raise LostServerError(
                    f"{self._names[number]} has not been heard of for {seconds:.0f} s (MPITRAIN_HANG_SECONDS), and no "
                    "answer of a worker is whole without it. Start the job again: it goes on from the newest checkpoint"
                )
        return [self._names[number] for number in silent]

    def _norm_of_all(self, norm: float) -> float:
        norms = self._wait("norm", self._peers.values(), "for the norm of its gradients")
        whole = math.hypot(norm, *(float(message.fields["norm"]) for message in norms.values()))
        self._tell("norm", {"norm": whole})
        return whole

    def _part(self, number: int) -> dict[str, Any]:
        return divided_of(self._adapter).part_state(number)

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        for peer in self._peers:
            self._link.send(peer, kind, fields)

    def _absent(self) -> set[int]:
        """The numbers of the servers that have not come yet."""
        return set(range(1, self.num + 1)) - self._names.keys()

    def _wait(self, kind: str, numbers: Collection[int], purpose: str) -> dict[int, Message]:
        """Return a message of this kind from each of these servers. Keep what comes from others."""
        messages, late = self._hear(kind, numbers, purpose, self._rules.hang_seconds)
        if late:
            self.is_apart = True
            raise LostServerError(
                f"server 0 on {self._host} has waited for {late} {purpose}, and has heard nothing for "
                f"{self._rules.hang_seconds:.0f} s (MPITRAIN_HANG_SECONDS). Start the job again: it goes on from the "
                "newest checkpoint"
            )
        return messages

    def _try_to_wait(self, kind: str, numbers: Collection[int], purpose: str, seconds: float) -> None:
        """Wait for such messages when the run has ended: what fails now is said, and changes nothing."""
        try:
            _, late = self._hear(kind, numbers, purpose, seconds)
            problem = f"{late} has not been heard of for {seconds:.0f} s" if late else ""
        except (ConfigError, LaunchError) as error:
            problem = str(error)
        if problem:
            self._rules.say(f"the run has ended, and server 0 waits no more for others {purpose}: {problem}")

    def _hear(
        self, kind: str, numbers: Collection[int], purpose: str, most_seconds: float
    ) -> tuple[dict[int, Message], str]:
        """Return a message of this kind from each of these servers. Keep what comes from others.

        Also return the names of those that have sent nothing for `most_seconds`, if the wait has ended for that. A
        server that sends something else meanwhile, or a part of a large message, is not silent.
        """
        waiting, messages = set(numbers), dict[int, Message]()
        begun = said = self._rules.now()
        heard, frames = dict.fromkeys(waiting, begun), self._frames()
        while waiting:
            come = [*self._events, *self._link.receive(_LOOK_SECONDS)]
            self._events.clear()
            for event in come:
                number = self._peers.get(event.peer)
                if isinstance(event, Gone) and number is not None:
                    if kind != "bye":
                        self.lose(event.peer, event.why)
                    waiting.discard(number)
                elif isinstance(event, Message) and event.kind == kind and (number or kind == "shard"):
                    if number is None:
                        self._join(event)
                    number = self.heard(event)
                    messages[number] = event
                    waiting.discard(number)
                elif isinstance(event, Message) and event.kind == "piece" and number is not None:
                    add_piece(self._pieces[number], event.fields, event.arrays)
                else:
                    self._events.append(event)
            now, before = self._rules.now(), frames
            frames = self._frames()
            heard |= {number: now for number, count in frames.items() if count != before.get(number)}
            late = [number for number in sorted(waiting) if now - heard[number] > most_seconds > 0]
            if late:
                return messages, self._listed(late)
            if waiting and now - said >= self._rules.stall_seconds:
                missing = self._listed(sorted(waiting))
                self._rules.say(f"server 0 has waited {now - begun:.0f} s for {missing} {purpose}")
                said = now
        return messages, ""

    def _frames(self) -> dict[int, int]:
        return {number: self._link.frames[peer] for peer, number in self._peers.items()}

    def _listed(self, numbers: Sequence[int]) -> str:
        return ", ".join(self._names.get(number, f"server {number}") for number in numbers)

    def _join(self, message: Message) -> None:
        """Take in a server that has come."""
        fields = message.fields
        number = fields.get("server")
        if type(number) is not int or not 1 <= number <= self.num or number in self._names:
            raise LaunchError(
                f"a peer says that it is server {number!r}; those that are not here yet are {sorted(self._absent())}"
            )
        self._names[number] = f"server {number} on {fields.get('where')}"
        self._peers[message.peer] = number
        problem = difference(fields.get("facts"), self._rules.facts)
        own, theirs = self._rules.optimizer, fields.get("optimizer")
        if not problem and own != theirs:
            problem = f"its optimizer is {theirs}, and that of server 0 {own}; give all servers the same"
        if problem:
            raise ConfigError(f"{self._names[number]} cannot work with server 0 on {self._host}: {problem}")


def _numbers(newest: int, live: Sequence[int]) -> dict[str, Any]:
    """Return these as fields. The live numbers are in rows, from the first one to the last one."""
    rows: list[list[int]] = []
    for number in sorted(live):
        if rows and rows[-1][1] == number - 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return {"newest": newest, "live": rows}
