"""GradientWorker asks for work units, computes their gradients and sends them, until the server ends the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.compression.codec import Codec
from mpitrain.cuda.failures import memory_explained
from mpitrain.data.prefetch import Prefetch
from mpitrain.errors import ConfigError, LaunchError, text_of
from mpitrain.server.gradients import GradientBuffer, check_told, plain_note
from mpitrain.server.parameters import Replica, divisions_of
from mpitrain.server.wire import Message
from mpitrain.server.worker_link import Patience, Silence, WorkerLink
from mpitrain.tree import Tree

# Returns the links of a worker to the servers besides the first one, which has told their ports.
LinksToOthers: TypeAlias = Callable[[Sequence[int]], list[WorkerLink]]

# After this time a worker repeats its request, with doubled intervals: a server in a long hook does not read, and few
# messages may wait there. On a new connection it repeats the request at once.
_REPEAT_SECONDS, _MOST_REPEAT_SECONDS = 1.0, 60.0
_LOOK_SECONDS = 0.2


class ShardLinks:
    """The connections of a worker to servers 1, 2 ... in order; there may be none."""

    def __init__(self, first: WorkerLink, links: Sequence[WorkerLink], replica: Replica, patience: Patience) -> None:
        """`first`: to the first server."""
        self._first, self._links, self._replica, self._patience = first, links, replica, patience
        self._pushed: list[tuple[dict[str, Any], Sequence[numpy.ndarray], int]] = []

    def pull(self, unit: Mapping[str, Any], known: Mapping[str, str], name: str) -> bool:
        """Get the parts of the parameters for a unit, at least as new as the first server's part.

        Return False if the connection to the first server has ended meanwhile. Then the unit is another worker's, and
        servers that were started again do not know it.

        Args:
            known: life of the first server, ticket of this worker, and token of the unit.
            name: of this worker, for errors.

        Raises:
            LaunchError: a server has not been heard of for `hang_seconds`.
            MismatchError: what came belongs to other parameters.
        """
        self._pushed = []
        connection = self._first.connections
        about = {**known, "number": unit["number"], "at_least": unit["version"]}
        questions = [{**about, "version": version} for version in self._replica.versions[1:]]
        for link, question in zip(self._links, questions, strict=True):  # all of them send at once
            link.send("pull", question)
        return all(
            self._receive(link, server, question, name, connection)
            for server, (link, question) in enumerate(zip(self._links, questions, strict=True), 1)
        )

    def _receive(
        self, link: WorkerLink, server: int, question: Mapping[str, Any], name: str, first_connection: int
    ) -> bool:
        """Receive the answer of a server. Ask again on a new connection: messages are lost only with a connection.

        False: as for `pull`.
        """
        silence, connection = Silence(link, self._patience), link.connections
        while True:
            message = link.receive(_LOOK_SECONDS)
            self._check(message, link, name)
            if message is not None and message.fields.get("number") == question["number"]:
                self._replica.take(message.fields, message.arrays, server)
                return True
            if not self._first.has_stayed(first_connection):
                return False
            silence.look(name)
            if link.connections != connection:
                link.send("pull", question)
                connection = link.connections

    def push(self, fields: Mapping[str, Any], arrays: Sequence[Sequence[numpy.ndarray]]) -> None:
        """Send each server its part of the gradients. The arrays must not change before the next `pull`."""
        self._pushed = []
        for link, of_server in zip(self._links, arrays, strict=True):
            link.send("push", fields, of_server)
            self._pushed.append((dict(fields), of_server, link.connections))

    def resend(self, name: str) -> None:
        """Send again what may have been lost, because a connection has been replaced.

        Args:
            name: of this worker, for errors.

        Raises:
            LaunchError: a server refuses what was pushed.
        """
        for index, (fields, arrays, connection) in enumerate(self._pushed):
            link = self._links[index]
            message = link.receive(0.0)  # an answer to a question that was repeated is not needed any more
            self._check(message, link, name)
            if link.connections != connection:
                link.send("push", fields, arrays)
                self._pushed[index] = fields, arrays, link.connections

    def _check(self, message: Message | None, link: WorkerLink, name: str) -> None:
        if message is not None and message.kind == "refused":
            raise LaunchError(f"{name}: {link.name}: {message.fields.get('text')}")

    def close(self) -> None:
        """Close all connections."""
        for link in self._links:
            link.close()


@runtime_checkable
class IndexedSource(Protocol):
    """A data source from which units are cut, such as ArrayData."""

    num_samples: int
    global_batch: int

    def read(self, epoch: int, begin: int, end: int) -> Tree: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def source_of(data: object) -> IndexedSource:
    """Return the source from which units are cut: `data`, or the source that it reads ahead.

    Raises:
        ConfigError: its samples have no numbers.
    """
    source = data.source if isinstance(data, Prefetch) else data
    if not isinstance(source, IndexedSource):
        raise ConfigError(
            f"a server hands out samples by their numbers, and {type(source).__name__} has no method "
            "read(epoch, begin, end); ArrayData and MapData have it"
        )
    return source


class GradientWorker:
    """One worker. It holds a replica of the parameters and no position in the data.

    Attributes:
        name: as the server calls this worker.
        units: the number of answers that were sent.
    """

    def __init__(
        self,
        link: WorkerLink,
        others: LinksToOthers,
        adapter: Adapter,
        data: IndexedSource,
        codec: Codec | None,
        hello: Mapping[str, Any],
        patience: Patience,
    ) -> None:
        """
        Args:
            link: to the first server, which has the units.
            others: makes the links to the others when the first one has told their ports.
            hello: the fields of the first message: name, host, and facts, as in ServerRules.
            patience: with each of the servers.
        """
        self.name, self.units = str(hello.get("name") or f"a worker on {hello.get('host')}"), 0
        self._link, self._others, self._codec = link, others, codec
        self._adapter, self._data, self._hello = adapter, data, hello
        self._patience = patience
        self._silence = Silence(link, self._patience)
        self._divide(1)
        self._shards = ShardLinks(link, [], self._replica, self._patience)
        self._life = self._ticket = ""

    def work(self) -> None:
        """Work until the server reports that the training is over.

        Raises:
            LaunchError: the server refuses this worker, or a server has not been heard of for `hang_seconds`.
            ConfigError: the run cannot continue, as the server says.
            MpitrainError: the gradients of a unit cannot be computed here. The server has been told.
        """
        kind, fields, has_asked = "hello", dict(self._hello), False
        while True:
            message = self._ask(kind, fields, has_asked)
            has_asked = False
            if message.kind in ("over", "refused"):
                self._link.send("bye", {})
            if message.kind == "over":
                return
            if message.kind == "refused":
                kind_of_error = ConfigError if message.fields.get("is_config") else LaunchError
                raise kind_of_error(str(message.fields.get("text")))
            if message.kind == "again":
                kind, fields = "hello", dict(self._hello)
            elif message.kind == "welcome":
                self.name = str(message.fields["name"])
                if message.fields["life"] != self._life:
                    self._life = message.fields["life"]
                    self._meet(message.fields["ports"])
                self._ticket = message.fields["ticket"]
                kind, fields = "next", self._known()
            elif message.kind == "unit":
                has_asked = self._compute(message.fields, message.arrays)  # an answer asks for the next unit
                kind, fields = "next", self._known()

    def close(self) -> None:
        """Close the connections to the other servers."""
        self._shards.close()

    def _meet(self, ports: Sequence[int]) -> None:
        """The servers have changed, and there may be more or fewer: connect to those at these ports."""
        self._shards.close()
        self._shards = ShardLinks(self._link, [], self._replica, self._patience)  # if the next ones cannot be made
        if len(self._replica.versions) == 1 + len(ports):
            self._replica.forget()
        else:
            self._divide(1 + len(ports))
        self._shards = ShardLinks(self._link, self._others(ports), self._replica, self._patience)

    def _divide(self, num_servers: int) -> None:
        """Make room for the parts of so many servers. The codec's error-feedback residual is lost."""
        self._replica = Replica(self._adapter, num_servers)
        self._buffer = GradientBuffer(divisions_of(self._adapter, num_servers)[0], self._codec, self.name)

    def _known(self) -> dict[str, Any]:
        return {"life": self._life, "version": self._replica.versions[0]}

    def _ask(self, kind: str, fields: dict[str, Any], has_asked: bool) -> Message:
        """Send a message, unless this worker has asked already. Send it from time to time until the server answers."""
        self._silence.end()  # the time of a computation does not count as silence of the server
        now = self._patience.now
        asked, repeat_seconds = now() if has_asked else -math.inf, _REPEAT_SECONDS
        connection = self._link.connections
        while True:
            if now() - asked >= repeat_seconds or self._link.connections != connection:
                if asked > -math.inf:
                    repeat_seconds = min(2 * repeat_seconds, _MOST_REPEAT_SECONDS)
                self._link.send(kind, fields)
                asked, connection = now(), self._link.connections
            message = self._link.receive(_LOOK_SECONDS)
            if message is None:
                self._shards.resend(self.name)
                self._silence.look(self.name)
                continue
            self._silence.end()
            # Several questions may have been sent before the first of these answers came.
            if message.kind == "wait" or (message.kind, kind) in (("again", "hello"), ("welcome", "next")):
                continue
            return message

    def _compute(self, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]) -> bool:
        """Answer a unit. False: it was lost with the servers, and there is no answer."""
        unit = {"life": self._life, "number": fields["number"]}
        # A failure here is not due to the samples, so it is not reported to the server, which only sees that this
        # worker ends.
        self._replica.take(fields, arrays)
        known = {"life": self._life, "ticket": self._ticket, "token": fields.get("token", "")}
        if not self._shards.pull(fields, known, self.name):
            return False
        self._replica.load()
        try:
            scale = self._adapter.loss_scale
            if scale is not None:
                scale.restore(fields["loss_scale"])
            batch = self._data.read(fields["epoch"], fields["begin"], fields["end"])
            self._buffer.begin()
            with memory_explained():
                loss = self._adapter.loss_and_gradients(batch, self._buffer.take)
            factor = 1.0 if scale is None else scale.value
            unused, (own, *others) = self._buffer.finish(factor)
            note = self._adapter.note()
            check_told((tuple(unused), note))
        except Exception as error:
            self._link.send("failed", {**unit, "text": f"{type(error).__name__}: {text_of(error)}"})
            raise
        self._shards.push({**unit, **known}, others)
        told = {"loss": loss, "scale": factor, "unused": unused, "note": plain_note(note)}
        self._link.send("done", {**unit, "version": self._replica.versions[0], **told}, own)
        self.units += 1
        return True
