"""ShardServer is a further server: it serves its shard of the parameters to workers, and follows the first server.

worker:  pull ─> parameters   push (a part of the gradients) ─> the first server hears of it: have
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy

from mpitrain.adapters.adapter import DividedAdapter
from mpitrain.errors import ConfigError, GradientError, LaunchError
from mpitrain.reducer.means import Told
from mpitrain.server.gradients import read_told
from mpitrain.server.parameters import ParameterShard, add_piece, pieces_of
from mpitrain.server.security import has_token
from mpitrain.server.server_link import Disconnected, ServerLink
from mpitrain.server.status import ByteCounts
from mpitrain.server.wire import Message, Peer, number_in, wait_for
from mpitrain.server.worker_link import Patience, Silence, WorkerLink

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0


class _RunOverError(Exception):
    """The first server has ended the run, perhaps within an update."""


class ShardServer:
    """A further server. It makes no decisions, and follows the first server; server.shards has the other side."""

    def __init__(
        self,
        link: ServerLink,
        first: WorkerLink,
        shard: ParameterShard,
        adapter: DividedAdapter,
        hello: Mapping[str, Any],
        patience: Patience,
        *,
        num_servers: int,
        name: str,
    ) -> None:
        """
        Args:
            link: for the workers.
            first: to the first server.
            hello: the number of this server, where it is, and facts, as in ServerRules.
            patience: with the first server.
            name: of this server, for errors.
        """
        self._link, self._first, self._shard, self._adapter = link, first, shard, adapter
        self._hello, self._patience, self._name = hello, patience, name
        self._life = self._secret = ""
        self._connections = 0  # to the first server, when its first message had come
        self._bytes = ByteCounts()
        self._told, self._used = list[Told](), list[Any]()  # of the next update
        self._pulls: dict[Peer, Mapping[str, Any]] = {}  # those that wait for a newer version
        self._commands: dict[str, Callable[[Mapping[str, Any], list[numpy.ndarray]], None]] = {
            "carry": self._carry,
            "piece": lambda fields, arrays: add_piece(self._pieces, fields, arrays),
            "settle": self._settle,
            "told": lambda fields, _: self._told.append(read_told(fields["told"])),
            "answers": lambda fields, _: self._used.extend(fields["answers"]),
            "update": self._update,
            "forget": lambda fields, _: self._shard.forget(**fields),
            "fetch": self._fetch,
            "ask": lambda *_: self._tell("here", {}),
        }
        self._number: int = hello["server"]
        self._pieces: dict[str, Any] = {}  # those that have come and are not settled
        adapter.update_only(self._number, num_servers, self._norm_of_all)

    def serve(self) -> None:
        """Serve until the first server reports that the run is over.

        Raises:
            LaunchError: the first server does not come, or is gone.
            ConfigError: the run cannot continue, as the first server says.
        """
        with suppress(_RunOverError):
            self._begin()
            while True:
                wait_for([*self._link.sockets, *self._first.sockets], _LOOK_SECONDS)
                while (message := self._hear(0.0)) is not None:
                    self._commands[message.kind](message.fields, message.arrays)
                for event in self._link.receive(0.0):
                    self._handle(event)
                for peer in list(self._pulls):
                    self._answer(peer)

    # -- the first server -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Send hello until the first server has sent the parameters. Workers are not served before that."""
        silence, told = Silence(self._first, self._patience), -1
        while not self._life:
            if not self._connections and told != self._first.connections:  # what was sent without one is lost
                self._first.send("shard", self._hello)
                told = self._first.connections
            message = self._hear(_LOOK_SECONDS)
            silence.look(self._name, "server", "Start the job again")
            if message is not None:
                self._commands[message.kind](message.fields, message.arrays)

    def _hear(self, seconds: float) -> Message | None:
        """Return the next message of the first server. A message lost with a connection might be an update."""
        message, first = self._first.receive(seconds), self._first
        if message is not None:
            self._connections = self._connections or first.connections
            if message.kind == "over":
                first.send("bye", {})
                if problem := message.fields["problem"]:
                    raise ConfigError(problem)
                raise _RunOverError
        elif self._connections and not (first.is_connected and first.connections == self._connections):
            time.sleep(_PATIENCE_SECONDS)  # if the first server has failed, its own error says more, and ends the job
            raise LaunchError(
                f"{self._name} has lost the connection to the first server, and what that has sent. Start the job "
                "again: it resumes from the newest checkpoint"
            )
        return message

    def _carry(self, fields: Mapping[str, Any], arrays: list[numpy.ndarray]) -> None:
        self._secret = fields["secret"]
        self._shard.carry({array.dtype: array for array in arrays})

    def _settle(self, fields: Mapping[str, Any], _: list[numpy.ndarray]) -> None:
        self._adapter.take_part_state(self._number, self._pieces, fields["gone"])
        self._pieces = {}
        self._life = fields["life"]
        self._shard.follow(fields["version"])

    def _update(self, fields: Mapping[str, Any], _: list[numpy.ndarray]) -> None:
        used, told = self._used, self._told
        self._used, self._told = [], []
        self._shard.update(used, told, fields["plan"], fields["staleness"])
        self._shard.follow(fields["version"])
        self._shard.forget(fields["newest"], fields["live"])

    def _fetch(self, _: Mapping[str, Any], __: list[numpy.ndarray]) -> None:
        for fields, arrays in pieces_of(self._adapter.part_state(self._number)):
            self._first.send("piece", fields, arrays)
        self._tell("state", {})

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send the first server a message, with the bytes that this server has received and sent so far."""
        self._first.send(kind, {**fields, "bytes": asdict(self._bytes)})

    def _norm_of_all(self, norm: float) -> float:
        self._tell("norm", {"norm": norm})
        while (message := self._hear(_LOOK_SECONDS)) is None:
            pass
        assert message.kind == "norm", message.kind
        return float(message.fields["norm"])

    # -- workers --------------------------------------------------------------------------------------------------

    def _handle(self, event: Message | Disconnected) -> None:
        if isinstance(event, Disconnected):
            self._pulls.pop(event.peer, None)
        elif event.kind == "hello":  # a worker that was given the port of this server
            port = self._first.address.rpartition(":")[2]
            self._refuse(
                event.peer,
                "gives out no work units. Start the worker with the address of the first server, which listens at port "
                f"{port}",
            )
        elif event.fields.get("life") != self._life:
            return
        elif not has_token(self._secret, event.fields):
            kind = event.kind[:100]
            self._refuse(event.peer, f"got a message {kind!r} without the token of a work unit of the first server")
        elif event.kind == "pull":
            self._pulls[event.peer] = event.fields
        elif event.kind == "push":
            self._push(event)

    def _refuse(self, peer: Peer, why: str) -> None:
        self._link.send(peer, "refused", {"text": f"{self._name} {why}"})

    def _answer(self, peer: Peer) -> None:
        """Send parameters, if they are as new as the worker's unit."""
        fields = self._pulls[peer]
        if not number_in(fields, "at_least") <= self._shard.version:
            return
        del self._pulls[peer]
        known = number_in(fields, "version")
        pulled, arrays = self._shard.since(known if known <= self._shard.version else -1)
        self._link.send(peer, "parameters", {"number": fields.get("number"), **pulled}, arrays)
        nbytes = sum(array.nbytes for array in arrays)
        self._bytes.bytes_out += nbytes
        self._tell("pulled", {"ticket": fields["ticket"], "pulled_bytes": nbytes})

    def _push(self, message: Message) -> None:
        nbytes = sum(array.nbytes for array in message.arrays)
        self._bytes.bytes_in += nbytes
        ticket, number = message.fields["ticket"], message.fields["number"]
        not_finite = problem = ""
        try:
            not_finite = self._shard.push(ticket, number, message.arrays)
        except GradientError as error:
            problem = str(error)
        told = {"ticket": ticket, "number": number, "not_finite": not_finite, "problem": problem}
        self._tell("have", {**told, "pushed_bytes": nbytes})
