"""ShardServer: a further server. It has a part of the parameters, and makes the updates that the first server tells of.

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
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError, GradientError, LaunchError
from mpitrain.exchange.remarks import Told, remarks_of
from mpitrain.serve.ledger import ServerTally
from mpitrain.serve.link import Gone, ServerLink
from mpitrain.serve.passes import is_valid
from mpitrain.serve.pieces import add_piece, pieces_of
from mpitrain.serve.pushes import first_not_finite, mean_of, read_gradients, read_told
from mpitrain.serve.sockets import wait_for
from mpitrain.serve.store import ParameterStore
from mpitrain.serve.wire import Message, Peer
from mpitrain.serve.worker_link import WorkerLink

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0


class _RunOverError(Exception):
    """The first server has ended the run, perhaps within an update."""


class ShardServer:
    """Serves one part of the parameters. It decides nothing; serve.shards has the other side."""

    def __init__(
        self,
        link: ServerLink,
        first: WorkerLink,
        store: ParameterStore,
        adapter: DividedAdapter,
        codec: Codec | None,
        hello: Mapping[str, Any],
        *,
        num_servers: int,
        hang_seconds: float,
        name: str,
    ) -> None:
        """
        Args:
            link: for the workers.
            first: to the first server.
            hello: the number of this server, where it is, and facts, as in ServerRules.
            hang_seconds: the first server is waited for so long; 0: without end.
            name: of this server, for errors.
        """
        self._link, self._first, self._store, self._adapter = link, first, store, adapter
        self._codec, self._hello, self._hang_seconds, self._name = codec, hello, hang_seconds, name
        self._life = self._secret = ""
        self._connections = 0  # to the first server, when its first message had come
        self._tally, self._told = ServerTally(), list[Told]()
        # Of the next update: ticket, number of the job, place in what was told, and share.
        self._used: list[tuple[str, int, int, float]] = []
        self._newest, self._live = 0, list[range]()  # of the jobs
        # By ticket of the worker and number of the job: the gradients, and the first parameter that is not finite. Jobs
        # that nobody needs any more are not here.
        self._pushes: dict[tuple[str, int], tuple[Mapping[numpy.dtype, numpy.ndarray], str]] = {}
        self._pulls: dict[Peer, Mapping[str, Any]] = {}  # those that wait for a newer version
        self._commands: dict[str, Callable[[Mapping[str, Any], list[numpy.ndarray]], None]] = {
            "carry": self._carry,
            "piece": self._take_piece,
            "settle": self._settle,
            "told": self._hear_told,
            "answers": lambda fields, _: self._used.extend(fields["answers"]),
            "update": self._update,
            "forget": self._forget,
            "fetch": self._fetch,
            "ask": lambda *_: self._tell("here", {}),
        }
        self._number: int = hello["server"]
        self._pieces: dict[str, Any] = {}  # those that have come and are not settled
        adapter.update_only(self._number, num_servers, self._norm_of_all)

    def serve(self) -> None:
        """Serve until the first server says that the run is over.

        Raises:
            LaunchError: the first server does not come, or is gone.
            ConfigError: the run cannot go on, as the first server says.
        """
        with suppress(_RunOverError):
            self._serve()

    def _serve(self) -> None:
        self._begin()
        while True:
            wait_for([*self._link.sockets, *self._first.sockets], _LOOK_SECONDS)
            while (message := self._hear(0.0)) is not None:
                self._commands[message.kind](message.fields, message.arrays)
            for event in self._link.receive(0.0):
                if isinstance(event, Gone):
                    self._pulls.pop(event.peer, None)
                elif event.kind == "hello":  # a worker that was given the port of this server
                    self._refuse(
                        event.peer,
                        "gives out no jobs. Start the worker with the address of the first server, which listens at "
                        f"port {self._first.address.rpartition(':')[2]}",
                    )
                elif event.fields.get("life") == self._life:
                    self._handle(event)
            for peer in list(self._pulls):
                self._answer(peer)

    # -- the first server -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Say hello until the first server has told what the parameters are. No worker is listened to before."""
        heard, frames, told = time.monotonic(), 0, -1
        while not self._life:
            if not self._connections and told != self._first.connections:  # what was sent without one is lost
                self._first.send("shard", self._hello)
                told = self._first.connections
            message = self._hear(_LOOK_SECONDS)
            if self._first.frames != frames:  # also a part of a large message
                heard, frames = time.monotonic(), self._first.frames
            seconds = time.monotonic() - heard
            if message is not None:
                self._commands[message.kind](message.fields, message.arrays)
            elif self._hang_seconds and seconds > self._hang_seconds:
                raise LaunchError(
                    f"{self._name} has not heard of the first server for {seconds:.0f} s (MPITRAIN_HANG_SECONDS): "
                    f"{self._first.trouble()}"
                )

    def _hear(self, seconds: float) -> Message | None:
        """Return the next message of the first server. One that is lost with a connection would be an update."""
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
                "again: it goes on from the newest checkpoint"
            )
        return message

    def _carry(self, fields: Mapping[str, Any], arrays: list[numpy.ndarray]) -> None:
        self._secret = fields["secret"]
        self._store.carry({array.dtype: array for array in arrays})

    def _take_piece(self, fields: Mapping[str, Any], arrays: list[numpy.ndarray]) -> None:
        add_piece(self._pieces, fields, arrays)

    def _settle(self, fields: Mapping[str, Any], _: list[numpy.ndarray]) -> None:
        self._adapter.take_part_state(self._number, self._pieces, fields["gone"])
        self._pieces = {}
        self._life = fields["life"]
        self._store.follow(fields["version"])

    def _hear_told(self, fields: Mapping[str, Any], _: list[numpy.ndarray]) -> None:
        self._told.append(read_told(fields["told"]))

    def _update(self, fields: Mapping[str, Any], _: list[numpy.ndarray]) -> None:
        used, told = self._used, self._told
        self._used, self._told = [], []
        pushes = [self._pushes.pop((ticket, number))[0] for ticket, number, _, _ in used]
        remarks = remarks_of([told[place] for _, _, place, _ in used])
        shares = [share for _, _, _, share in used]
        self._store.apply(mean_of(pushes, shares), remarks, fields["plan"], fields["staleness"])
        self._store.follow(fields["version"])
        self._forget(fields, [])

    def _forget(self, fields: Mapping[str, Any], _: list[numpy.ndarray]) -> None:
        self._newest = fields["newest"]
        self._live = [range(first, last + 1) for first, last in fields["live"]]
        self._pushes = {key: push for key, push in self._pushes.items() if self._is_needed(key[1])}

    def _is_needed(self, number: int) -> bool:
        """Whether a job may still be in an update."""
        return number > self._newest or any(number in live for live in self._live)

    def _fetch(self, _: Mapping[str, Any], __: list[numpy.ndarray]) -> None:
        for fields, arrays in pieces_of(self._adapter.part_state(self._number)):
            self._first.send("piece", fields, arrays)
        self._tell("state", {})

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send the first server a message, and with each what this server has taken in and sent out so far."""
        self._first.send(kind, {**fields, "tally": asdict(self._tally)})

    def _norm_of_all(self, norm: float) -> float:
        self._tell("norm", {"norm": norm})
        while (message := self._hear(_LOOK_SECONDS)) is None:
            pass
        assert message.kind == "norm", message.kind
        return float(message.fields["norm"])

    # -- workers --------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        if not is_valid(self._secret, message.fields):
            kind = message.kind[:100]
            self._refuse(message.peer, f"got a message {kind!r} without the pass of a job of the first server")
        elif message.kind == "pull":
            self._pulls[message.peer] = message.fields
        elif message.kind == "push":
            self._push(message)

    def _refuse(self, peer: Peer, why: str) -> None:
        self._link.send(peer, "refused", {"text": f"{self._name} {why}"})

    def _answer(self, peer: Peer) -> None:
        """Send parameters, if they are as new as the worker's job."""
        fields = self._pulls[peer]
        if not _whole(fields.get("at_least")) <= self._store.version:
            return
        del self._pulls[peer]
        known = _whole(fields.get("version"))
        pulled, arrays = self._store.since(known if known <= self._store.version else -1)
        self._link.send(peer, "parameters", {"number": fields.get("number"), **pulled}, arrays)
        nbytes = sum(array.nbytes for array in arrays)
        self._tally.bytes_out += nbytes
        self._tell("pulled", {"ticket": fields["ticket"], "pulled_bytes": nbytes})

    def _push(self, message: Message) -> None:
        """Take in gradients. Those that were sent twice, on two connections, count once."""
        nbytes = sum(array.nbytes for array in message.arrays)
        self._tally.bytes_in += nbytes
        key: tuple[str, int] = message.fields["ticket"], message.fields["number"]
        not_finite = problem = ""
        if key in self._pushes:
            _, not_finite = self._pushes[key]
        elif self._is_needed(key[1]):
            try:
                flats = read_gradients(message.arrays, self._store.part, self._codec)
                not_finite = first_not_finite(flats, self._store.layout, self._store.part)
                self._pushes[key] = flats, not_finite
            except GradientError as error:
                problem = str(error)
        told = {"ticket": key[0], "number": key[1], "not_finite": not_finite, "problem": problem}
        self._tell("have", {**told, "pushed_bytes": nbytes})


def _whole(value: object) -> int:
    return value if type(value) is int else -1
