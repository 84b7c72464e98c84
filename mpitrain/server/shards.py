"""All servers of a run, as the first one directs them.

    first server:       pieces, settle ─> update, update, forget, update ... fetch ─>     ... over
    shard:       shard ─>              have (a part of an answer) ...          ─> pieces, state ─> bye

All shards get the same messages in the same order, so they have the same versions. Each has the whole model, and
updates its part. If hooks read the model, the first server fetches the parts; changes by hooks are sent back.
"""

from __future__ import annotations

import hmac
import json
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import numpy

from mpitrain.adapters.adapter import Adapter, divided_of
from mpitrain.errors import ConfigError, LaunchError, LostServerError
from mpitrain.reducer.division import line_of, sizes_of
from mpitrain.reducer.means import Told
from mpitrain.server.gradients import plain_told
from mpitrain.server.parameters import ParameterShard, add_piece, difference_of, divisions_of, pieces_of
from mpitrain.server.registry import RejectedPeers, ServerRules, difference
from mpitrain.server.security import make_secret, server_token, token_of
from mpitrain.server.server_link import Disconnected, Event, ServerLink
from mpitrain.server.status import ByteCounts
from mpitrain.server.wire import Message, Peer

_LOOK_SECONDS = 0.5
# The time without an answer after which the servers are asked whether they are alive, and the time between two
# questions.
_ASK_SECONDS = 1.0
# In one message, whose header has at most wire.MOST_HEADER_BYTES. An answer takes less than 100 of them.
_MOST_ANSWERS = 10_000


class Shards:
    """The first server's own shard, and the further servers with the other shards, if any.

    Attributes:
        own: the shard of the first server.
        num: how many further servers there are.
        is_apart: an error occurred before all servers had done the same, or one of them is gone.
        rejected_peers: counts peers that are sent away.
    """

    def __init__(
        self,
        link: ServerLink,
        events: deque[Event],
        adapter: Adapter,
        own: ParameterShard,
        rules: ServerRules,
        byte_counts: list[ByteCounts],
        host: str,
    ) -> None:
        """
        Args:
            events: what comes from others in a wait for servers is added here.
            byte_counts: of all servers; those of the further ones are kept up to date here.
            host: of the first server, with its rank if it has one.
        """
        self.own, self.num, self.is_apart = own, len(byte_counts) - 1, False
        self.rejected_peers = RejectedPeers(link, rules.say, rules.now)
        self._link, self._events, self._adapter, self._rules = link, events, adapter, rules
        self._byte_counts, self._name = byte_counts, f"server 0 on {host}"
        self._gradients, self._parameters = divisions_of(adapter, len(byte_counts))
        self._sizes, self._secret = sizes_of(self._parameters), make_secret()
        self._peers: dict[Peer, int] = {}
        self._names = {0: self._name}  # of the servers that have come
        self._ports: dict[int, int] = {}
        # By server: when it was asked whether it is there, and how many frames had come from it then.
        self._asked: dict[int, tuple[float, int]] = {}
        self._next_question = 0.0
        self._version = -1  # that was told last
        self._is_fetched = False
        self._pieces: dict[int, dict[str, Any]] = {}  # those that have come, by server and name
        self._fetched: dict[int, dict[str, Any]] = {}  # as they came, to see what is changed here
        if self.num:
            divided_of(adapter).update_only(0, len(byte_counts), self._norm_of_all)

    # -- who is there ---------------------------------------------------------------------------------------------

    def knows(self, peer: Hashable) -> bool:
        """Whether a peer is one of the further servers."""
        return peer in self._peers

    @property
    def ports(self) -> list[int]:
        """Where the further servers listen, each on its host, in order. All must be connected."""
        return [self._ports[number] for number in range(1, 1 + self.num)]

    def parts(self) -> list[dict[str, Any]]:
        """Return the part of each server, and its traffic; [] if there is one server."""
        rows = zip(self._all_names(), self._sizes, self._byte_counts, strict=True) if self.num else ()
        return [{"name": name, **asdict(size), **asdict(counts)} for name, size, counts in rows]

    def heard(self, message: Message) -> int:
        """Note that a message has come from one of the servers. Return the server's number."""
        number = self._peers[message.peer]
        if "bytes" in message.fields:
            self._byte_counts[number] = ByteCounts(**message.fields["bytes"])
        return number

    def lose(self, peer: Peer, why: str) -> NoReturn:
        """Note that one of the servers is gone.

        Raises:
            LaunchError: always.
        """
        name = self._names[self._peers.pop(peer)]
        raise self._lost(f"{name} is gone ({why}), and its part of the parameters with it")

    def look(self, now: float, quiet_seconds: float) -> list[str]:
        """Ask the further servers whether they are alive while no worker answers.

        A worker that does not answer may be slow, or may wait for a server that does not answer it.

        Args:
            now: by the clock of the WorkerRegistry.
            quiet_seconds: for which no answer has come although units are out.

        Returns:
            The names of those that do not answer.

        Raises:
            LaunchError: one of them has not answered for `hang_seconds`.
        """
        frames = self._frames()
        self._asked = {number: asked for number, asked in self._asked.items() if frames.get(number) == asked[1]}
        if quiet_seconds >= _ASK_SECONDS and now >= self._next_question:
            self._next_question = now + _ASK_SECONDS
            for peer, number in self._peers.items():
                if number not in self._asked:
                    self._link.send(peer, "ask", {})
                    self._asked[number] = now, frames[number]
        silent = {number: now - asked for number, (asked, _) in self._asked.items() if now - asked >= _ASK_SECONDS}
        for number, seconds in silent.items():
            if self._rules.hang_seconds and seconds > self._rules.hang_seconds:
                raise self._lost(
                    f"{self._names[number]} has not been heard from for {seconds:.0f} s "
                    "(MPITRAIN_HANG_SECONDS), and no answer of a worker is complete without it"
                )
        return [self._names[number] for number in silent]

    def gather(self) -> None:
        """Wait until all servers are connected.

        Raises:
            LaunchError: one of them is gone, or does not come.
            ConfigError: one of them trains something else.
        """
        self._wait("shard", self._absent(), "to come")

    def gather_late(self, seconds: float) -> None:
        """Wait up to `seconds` for servers that have not come until the run ends; 0: without end."""
        self._try_to_wait("shard", self._absent(), "to come", seconds)

    def end(self, problem: str, seconds: float) -> None:
        """Shut the servers down, when no worker needs them any more. The run has ended, so it does not fail here.

        Args:
            problem: for an error of each of them; "": they end with exit code 0.
            seconds: they are waited for so long; 0: without end.
        """
        self._tell("over", {"problem": problem})
        self._try_to_wait("bye", self._peers.values(), "to end", seconds)

    # -- what all of them do --------------------------------------------------------------------------------------

    def begin(self, carried: Mapping[numpy.dtype, numpy.ndarray]) -> None:
        """Send all servers the parameters, the optimizer's state, and the carried values. Call `gather` first.

        Args:
            carried: flat buffers that are added to the gradients of the first update.
        """
        self.own.carry({dtype: flat[self.own.part[dtype]] for dtype, flat in carried.items()})
        if self.num:
            self._rules.say(line_of(self._parameters, self._all_names()))
        for peer, number in self._peers.items():
            parts = [flat[self._gradients.parts[number][dtype]] for dtype, flat in carried.items()]
            self._link.send(peer, "carry", {"secret": self._secret}, parts)
        self._settle({number: (self._part(number), []) for number in self._peers.values()})

    def note_changes(self) -> None:
        """Note the changes of the last update and of the hooks after it. No unit is handed out before this."""
        differences = {number: difference_of(state, self._part(number)) for number, state in self._fetched.items()}
        changes = {number: (changed, gone) for number, (changed, gone) in differences.items() if changed or gone}
        self._fetched, self._is_fetched = {}, False
        self.own.note_changes(elsewhere=bool(changes))
        if changes or self._version != self.own.version:
            self._settle(changes)

    def update(
        self,
        gradients: Sequence[tuple[str, int, float]],
        told: Sequence[Told],
        rate_factor: float,
        staleness: int,
        newest: int,
        live: Sequence[Sequence[int]],
    ) -> float:
        """Make an update on all servers. Return the learning rate.

        Args:
            gradients: in the order in which they are added up: ticket of the worker, number of the unit, and share.
            told: with these gradients.
            rate_factor: see ParameterShard.plan.
            staleness: the largest of these gradients.
            newest, live: as for `forget`, after this update.
        """
        plan = self.own.plan(rate_factor)
        # Each of its own, so that the notes of any number of workers are never too long for a message.
        texts = [json.dumps(plain_told(one)) for one in told]
        distinct = dict(zip(texts, told, strict=True))
        places = {text: place for place, text in enumerate(distinct)}
        used = [[*gradient[:2], places[text], gradient[2]] for gradient, text in zip(gradients, texts, strict=True)]
        with self._together():
            for text in distinct:
                self._tell("told", {"told": json.loads(text)})
            for begin in range(0, len(used), _MOST_ANSWERS):
                self._tell("answers", {"answers": used[begin : begin + _MOST_ANSWERS]})
            self._version, self._is_fetched = self.own.version + 1, False
            fields = {"version": self._version, "plan": plan, "staleness": staleness, "newest": newest, "live": live}
            self._tell("update", fields)
            rate = self.own.update(used, list(distinct.values()), plan, staleness)
            self.own.forget(newest, live)
        return rate

    def forget(self, newest: int, live: Sequence[Sequence[int]]) -> None:
        """Let all servers drop the gradients of units that are over; see WorkQueue.live and ParameterShard.forget."""
        self.own.forget(newest, live)
        self._tell("forget", {"newest": newest, "live": live})

    def token_for(self, ticket: str, number: int) -> dict[str, str]:
        """Return what shows the further servers that a worker has a unit: its field "token"."""
        return {"token": token_of(self._secret, ticket, number)} if self.num else {}

    def fetch(self) -> None:
        """Bring the parameters and the optimizer's state of all servers into the model of this one.

        Raises:
            LaunchError: a server is gone, or does not answer, or `is_apart`.
        """
        if not self.num or self._version < 0 or self._is_fetched:
            return
        with self._together():
            self._pieces = {number: {} for number in self._peers.values()}
            self._tell("fetch", {})
            self._wait("state", self._peers.values(), "for its part of the model")
            for number, state in self._pieces.items():
                gone = [name for name in self._part(number) if name not in state]
                divided_of(self._adapter).take_part_state(number, state, gone)
            self._fetched, self._is_fetched = self._pieces, True

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A block in which all servers do the same.

        Raises:
            LaunchError: `is_apart`.
        """
        if self.is_apart:
            raise self._lost(
                f"{self._name} has outdated parts of the model: another server is gone, or an error occurred "
                "before all of them had done the same"
            )
        self.is_apart = True
        yield
        self.is_apart = False

    def _settle(self, changes: Mapping[int, tuple[Mapping[str, Any], Sequence[str]]]) -> None:
        """Give the servers the values, by name, that are new here, and the names that are gone. Tell the version."""
        with self._together():
            self._version = self.own.version
            for peer, number in self._peers.items():
                changed, gone = changes.get(number, ({}, []))
                for fields, arrays in pieces_of(changed):
                    self._link.send(peer, "piece", fields, arrays)
                self._link.send(peer, "settle", {"version": self._version, "life": self._rules.life, "gone": gone})

    def _norm_of_all(self, norm: float) -> float:
        norms = self._wait("norm", self._peers.values(), "for the norm of its gradients")
        whole = math.hypot(norm, *(float(message.fields["norm"]) for message in norms.values()))
        self._tell("norm", {"norm": whole})
        return whole

    def _part(self, number: int) -> dict[str, Any]:
        return divided_of(self._adapter).part_state(number)

    # -- messages -------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        for peer in self._peers:
            self._link.send(peer, kind, fields)

    def _wait(self, kind: str, numbers: Collection[int], purpose: str) -> dict[int, Message]:
        """Return a message of this kind from each of these servers. Keep what comes from others."""
        messages, late = self._hear(kind, numbers, purpose, self._rules.hang_seconds)
        if late:
            raise self._lost(
                f"{self._name} has waited for {late} {purpose}, and has heard nothing for "
                f"{self._rules.hang_seconds:.0f} s (MPITRAIN_HANG_SECONDS)"
            )
        return messages

    def _try_to_wait(self, kind: str, numbers: Collection[int], purpose: str, seconds: float) -> None:
        """Wait for such messages when the run has ended: failures are reported, and change nothing."""
        try:
            _, late = self._hear(kind, numbers, purpose, seconds)
            problem = f"{late} has not been heard from for {seconds:.0f} s" if late else ""
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
                if isinstance(event, Disconnected) and number is not None:
                    if kind != "bye":
                        self.lose(event.peer, event.why)
                    waiting.discard(number)
                elif isinstance(event, Message) and event.kind == kind and (number or kind == "shard"):
                    if number is None and not self._joins(event):
                        continue
                    number = self.heard(event)
                    messages[number] = event
                    waiting.discard(number)
                elif isinstance(event, Message) and event.kind == "piece" and number is not None:
                    add_piece(self._pieces[number], event.fields, event.arrays)
                else:
                    self._events.append(event)
            self.rejected_peers.look()
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

    def _joins(self, message: Message) -> bool:
        """Accept a server that has connected. False: the peer has a worker's key, and is not a server."""
        fields = message.fields
        number = fields.get("server")
        shown = str(fields.get("token")).encode()
        if not hmac.compare_digest(shown, server_token(self._rules.secret, number).encode()):
            said = f"says that it is server {str(number)[:100]}"
            self.rejected_peers.leave(f"it {said}, but does not have the proof")
            text = f"a peer that is not a server of this job {said}; it is refused"
            self._link.send(message.peer, "refused", {"text": text})
            return False
        if type(number) is not int or not 1 <= number <= self.num or number in self._names:
            raise LaunchError(
                f"a peer says that it is server {number!r}; those that are not here yet are {sorted(self._absent())}"
            )
        self._names[number] = f"server {number} on {fields.get('where')}"
        self._ports[number] = fields["port"]
        self._peers[message.peer] = number
        problem = difference(fields.get("facts"), self._rules.facts)
        own, given = self._rules.optimizer, fields.get("optimizer")
        if not problem and own != given:
            problem = f"its optimizer is {given}, and that of server 0 {own}; give all servers the same"
        if problem:
            raise ConfigError(f"{self._names[number]} cannot work with {self._name}: {problem}")
        return True

    def _lost(self, text: str) -> LostServerError:
        self.is_apart = True
        return LostServerError(f"{text}. Start the job again: it resumes from the newest checkpoint")

    def _absent(self) -> set[int]:
        """The numbers of the servers that have not connected yet."""
        return set(range(1 + self.num)) - self._names.keys()

    def _frames(self) -> dict[int, int]:
        return {number: self._link.frames[peer] for peer, number in self._peers.items()}

    def _listed(self, numbers: Sequence[int]) -> str:
        return ", ".join(self._names.get(number, f"server {number}") for number in numbers)

    def _all_names(self) -> list[str]:
        return [self._listed([number]) for number in range(1 + self.num)]
