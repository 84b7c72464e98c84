"""The connections of a worker to the servers besides the first one: it pulls parts of the parameters, and pushes parts
of gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpitrain.errors import LaunchError
from mpitrain.serve.replica import Replica
from mpitrain.serve.wire import Message
from mpitrain.serve.worker_link import WorkerLink

_LOOK_SECONDS = 0.2


class ServerLines:
    """The lines to servers 1, 2 ... in order; there may be none."""

    def __init__(
        self,
        first: WorkerLink,
        links: Sequence[WorkerLink],
        replica: Replica,
        *,
        stall_seconds: float,
        hang_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """`first`: to the first server; the others see JobWorker."""
        self._first, self._links, self._replica = first, links, replica
        self._stall_seconds, self._hang_seconds, self._say = stall_seconds, hang_seconds, say
        self._pushed: list[tuple[dict[str, Any], Sequence[numpy.ndarray], int]] = []

    def pull(self, job: Mapping[str, Any], known: Mapping[str, str], name: str) -> bool:
        """Get the parts of the parameters for a job, which are at least as new as that of the first server.

        Return False if the connection to the first server has ended meanwhile. Then the job is another worker's, and
        servers that were started again do not know it.

        Args:
            known: life of the first server, ticket of this worker, and pass of the job.
            name: of this worker, for errors.

        Raises:
            LaunchError: a server has not been heard of for `hang_seconds`.
            MismatchError: what came belongs to other parameters.
        """
        self._pushed = []
        connection = self._first.connections
        about = {**known, "number": job["number"], "at_least": job["version"]}
        versions = self._replica.versions
        for server, link in enumerate(self._links, 1):  # all of them send at once
            link.send("pull", {**about, "version": versions[server]})
        return all(
            self._receive(link, server, {**about, "version": versions[server]}, name, connection)
            for server, link in enumerate(self._links, 1)
        )

    def _receive(
        self, link: WorkerLink, server: int, question: Mapping[str, Any], name: str, first_connection: int
    ) -> bool:
        """Take in the answer of a server. Ask again on another connection: only with a connection is a message lost.

        False: as for `pull`.
        """
        heard = said = time.monotonic()
        connection, frames = link.connections, link.frames
        while True:
            message = link.receive(_LOOK_SECONDS)
            self._check(message, link, name)
            if message is not None and message.fields.get("number") == question["number"]:
                self._replica.take(message.fields, message.arrays, server)
                return True
            if not self._first.has_stayed(first_connection):
                return False
            now = time.monotonic()
            if link.frames != frames:  # a part of a large message
                heard, frames = now, link.frames
            silent = f"{name}: {link.name} has not been heard of for {now - heard:.0f} s"
            if self._hang_seconds and now - heard > self._hang_seconds:
                raise LaunchError(f"{silent} (MPITRAIN_HANG_SECONDS): {link.trouble()}")
            if now - max(heard, said) >= min(self._stall_seconds, self._hang_seconds or math.inf):
                self._say(f"{silent}: {link.trouble()}; this worker waits")
                said = now
            if link.connections != connection:
                link.send("pull", question)
                connection = link.connections

    def push(self, fields: Mapping[str, Any], arrays: Sequence[Sequence[numpy.ndarray]]) -> None:
        """Send each server its part of the gradients. The arrays must not change before the next `pull`."""
        self._pushed = []
        for link, of_server in zip(self._links, arrays, strict=True):
            link.send("push", fields, of_server)
            self._pushed.append((dict(fields), of_server, link.connections))

    def tend(self, name: str) -> None:
        """Send again what may have been lost, because a connection is another one now.

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
