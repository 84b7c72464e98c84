"""The further servers, as the first one hears of them: who is there, who is silent, and waits for their messages."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.serve.attendance import ServerRules, difference
from mpitrain.serve.ledger import ServerTally
from mpitrain.serve.link import Event, Gone, ServerLink
from mpitrain.serve.passes import server_pass
from mpitrain.serve.pieces import add_piece
from mpitrain.serve.shard_roll import RollOfShards
from mpitrain.serve.strangers import Strangers
from mpitrain.serve.wire import Message, Peer

_LOOK_SECONDS = 0.5


class LostServerError(LaunchError):
    """A further server is gone, and its part of the parameters with it."""


class ShardPeers:
    """The further servers, as the first one hears of them; there may be none.

    Attributes:
        num: how many there are.
        is_apart: an error has come before all servers had done the same, or one of them is gone.
        strangers: counts peers that are sent away.
    """

    def __init__(
        self, link: ServerLink, events: deque[Event], rules: ServerRules, tallies: list[ServerTally], host: str
    ) -> None:
        """See Shards."""
        self.num, self.is_apart = len(tallies) - 1, False
        self._link, self._events, self._rules = link, events, rules
        self._tallies, self._host = tallies, host
        self.strangers = Strangers(link, rules.say, rules.now)
        self._peers: dict[Peer, int] = {}
        self._names: dict[int, str] = {}
        self._ports: dict[int, int] = {}
        self._roll = RollOfShards(link)
        self._pieces: dict[int, dict[str, Any]] = {}  # those that have come, by server and name

    def knows(self, peer: Hashable) -> bool:
        """Whether a peer is one of these servers."""
        return peer in self._peers

    @property
    def ports(self) -> list[int]:
        """Where these servers listen, each on its host, in their order. All have come."""
        return [self._ports[number] for number in range(1, 1 + self.num)]

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

    def gather_late(self, seconds: float) -> None:
        """Wait up to `seconds` for servers that have not come until the run ends; 0: without end."""
        self._try_to_wait("shard", self._absent(), "to come", seconds)

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
                    if number is None and not self._joins(event):
                        continue
                    number = self.heard(event)
                    messages[number] = event
                    waiting.discard(number)
                elif isinstance(event, Message) and event.kind == "piece" and number is not None:
                    add_piece(self._pieces[number], event.fields, event.arrays)
                else:
                    self._events.append(event)
            self.strangers.look()
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

    def _joins(self, message: Message) -> bool:
        """Take in a server that has come. False: the peer has the key of a worker, and is no server."""
        fields = message.fields
        number = fields.get("server")
        shown = str(fields.get("pass")).encode()
        if not hmac.compare_digest(shown, server_pass(self._rules.secret, number).encode()):
            said = f"says that it is server {str(number)[:100]}"
            self.strangers.leave(f"it {said}, and has not the proof of one")
            text = f"a peer that is no server of this job {said}; it is refused"
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
            raise ConfigError(f"{self._names[number]} cannot work with server 0 on {self._host}: {problem}")
        return True
