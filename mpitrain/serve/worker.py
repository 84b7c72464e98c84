"""JobWorker: pulls jobs and parameters, computes gradients, sends them, until the server says that the run is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.compression.codec import Codec
from mpitrain.cuda.shortage import memory_explained
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.serve.connect import LinksToOthers
from mpitrain.serve.lines import ServerLines
from mpitrain.serve.pushes import GradientBuffer, check_told, plain_note
from mpitrain.serve.replica import Replica
from mpitrain.serve.store import divisions_of
from mpitrain.serve.wire import Message
from mpitrain.serve.worker_link import WorkerLink
from mpitrain.tree import Tree

# A worker repeats what it has asked for after so long, each time after twice as long: a server in a long hook does not
# read, and what waits there for it must stay little. On another connection it repeats it at once.
_REPEAT_SECONDS, _MOST_REPEAT_SECONDS = 1.0, 60.0
_LOOK_SECONDS = 0.2


class Places(Protocol):
    """A data source that can be read anywhere."""

    def read(self, epoch: int, begin: int, end: int) -> Tree: ...


class JobWorker:
    """One worker. It holds a replica of the parameters and no position in the data.

    Attributes:
        name: as the server calls this worker.
        jobs: the number of answers that were sent.
    """

    def __init__(
        self,
        link: WorkerLink,
        others: LinksToOthers,
        adapter: Adapter,
        data: Places,
        codec: Codec | None,
        hello: Mapping[str, Any],
        *,
        stall_seconds: float,
        hang_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            link: to the first server, which has the jobs.
            others: makes the links to the others when the first one has told their ports.
            hello: the fields of the first message: name, host, and facts, as in ServerRules.
            stall_seconds: after so long without an answer of the server, a line says so.
            hang_seconds: after so long without any message of the server, the worker gives up; 0: never.
            say: prints a line.
        """
        self.name, self.jobs = str(hello.get("name") or f"a worker on {hello.get('host')}"), 0
        self._link, self._others, self._codec = link, others, codec
        self._adapter, self._data, self._hello = adapter, data, hello
        self._stall_seconds, self._hang_seconds, self._say = stall_seconds, hang_seconds, say
        self._divide(1)
        self._lines = self._lines_to([])
        self._life = self._ticket = ""
        self._heard = self._said = time.monotonic()

    def work(self) -> None:
        """Work until the server says that the training is over.

        Raises:
            LaunchError: the server refuses this worker, or a server has not been heard of for `hang_seconds`.
            ConfigError: the run cannot go on, as the server says.
            MpitrainError: the gradients of a job cannot be computed here. The server has been told.
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
            elif message.kind == "job":
                has_asked = self._compute(message.fields, message.arrays)  # an answer asks for the next job
                kind, fields = "next", self._known()

    def close(self) -> None:
        """Close the connections to the other servers."""
        self._lines.close()

    def _meet(self, ports: Sequence[int]) -> None:
        """The servers are others now, and may be more or fewer: connect to those at these ports."""
        self._lines.close()
        self._lines = self._lines_to([])  # if the next ones cannot be made
        if len(self._replica.versions) == 1 + len(ports):
            self._replica.forget()
        else:
            self._divide(1 + len(ports))
        self._lines = self._lines_to(self._others(ports))

    def _divide(self, num_servers: int) -> None:
        """Make room for the parameters and gradients of so many servers. What a codec has left out is lost."""
        self._replica = Replica(self._adapter, num_servers)
        self._buffer = GradientBuffer(divisions_of(self._adapter, num_servers)[0], self._codec, self.name)

    def _lines_to(self, links: Sequence[WorkerLink]) -> ServerLines:
        limits: Any = {"stall_seconds": self._stall_seconds, "hang_seconds": self._hang_seconds, "say": self._say}
        return ServerLines(self._link, links, self._replica, **limits)

    def _known(self) -> dict[str, Any]:
        return {"life": self._life, "version": self._replica.versions[0]}

    def _ask(self, kind: str, fields: dict[str, Any], has_asked: bool) -> Message:
        """Send a message, unless this worker has asked already. Send it from time to time until the server answers."""
        self._heard = time.monotonic()  # the time of a computation is no silence of the server
        asked, repeat_seconds = self._heard if has_asked else -math.inf, _REPEAT_SECONDS
        connection, frames = self._link.connections, self._link.frames
        while True:
            now = time.monotonic()
            if now - asked >= repeat_seconds or self._link.connections != connection:
                if asked > -math.inf:
                    repeat_seconds = min(2 * repeat_seconds, _MOST_REPEAT_SECONDS)
                self._link.send(kind, fields)
                asked, connection = now, self._link.connections
            message = self._link.receive(_LOOK_SECONDS)
            if message is None:
                if self._link.frames != frames:  # a part of a large message
                    self._heard, frames = time.monotonic(), self._link.frames
                self._lines.tend(self.name)
                self._look_at_the_clock()
                continue
            self._heard = time.monotonic()
            # Several questions may have been sent before the first of these answers came.
            if message.kind == "wait" or (message.kind, kind) in (("again", "hello"), ("welcome", "next")):
                continue
            return message

    def _compute(self, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]) -> bool:
        """Answer a job. False: it was lost with the servers, and there is no answer."""
        job = {"life": self._life, "number": fields["number"]}
        # What fails here is no fault of the samples, so the server does not hear of it. It hears that this worker ends.
        self._replica.take(fields, arrays)
        known = {"life": self._life, "ticket": self._ticket, "pass": fields.get("pass", "")}
        if not self._lines.pull(fields, known, self.name):
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
            unused, (own, *others) = self._buffer.finish(1.0 if scale is None else scale.value)
            note = self._adapter.note()
            check_told((tuple(unused), note))
        except Exception as error:
            self._link.send("failed", {**job, "text": f"{type(error).__name__}: {error}"})
            raise
        self._lines.push({**job, **known}, others)
        answer = {**job, "version": self._replica.versions[0], "loss": loss, "unused": unused, "note": plain_note(note)}
        self._link.send("done", {**answer, "scale": 1.0 if scale is None else scale.value}, own)
        self.jobs += 1
        return True

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        silent = f"the server has not been heard of for {now - self._heard:.0f} s"
        if self._hang_seconds and now - self._heard > self._hang_seconds:
            raise LaunchError(
                f"{self.name}: {silent} (MPITRAIN_HANG_SECONDS): {self._link.trouble()}. Start this worker again when "
                "the server is there"
            )
        if now - max(self._heard, self._said) >= min(self._stall_seconds, self._hang_seconds or math.inf):
            limit = f" until {self._hang_seconds:.0f} s are over" if self._hang_seconds else ""
            self._say(f"{self.name}: {silent}: {self._link.trouble()}; this worker waits{limit}")
            self._said = time.monotonic()
