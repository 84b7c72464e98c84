"""The agents of all hosts of a job (agent.py), as the launcher sees them: one connection a host, over all attempts.

A thread keeps the connections alive, and distributes the messages: of an attempt to that attempt (watch.py), of the
memory to the keepers (keepers.py), of the warm interpreters to the holders (holders.py). It is a thread, because the
main thread may block on a reader of its output.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.processes import STARTING, left_out
from mpitrain.launch.reports import HostClock
from mpitrain.launch.trouble import AGENT_SILENCE_SECONDS, PATIENCE_SECONDS, SILENCE_SECONDS

BEAT_SECONDS = 1.0
END_SECONDS = 15.0
_SUSPENDED_SECONDS = SILENCE_SECONDS / 3  # after such a gap in its own time this process was suspended, not the hosts
# So many beats follow each other at once, to compare the host's clock: many jobs end in their first seconds.
_QUICK_BEATS = 20
_CLOSE_SECONDS = 3.0


class Watched(Protocol):
    """An attempt, which the thread serves."""

    token: str
    trouble: str | None

    @property
    def hosts(self) -> Iterable[str]:
        """The hosts that it needs."""

    @property
    def is_kept(self) -> bool:
        """Whether silence is trouble."""

    def take(self, host: str, message: dict[str, Any], heard: float, now: float) -> None:
        """Take in a message."""

    def beat(self) -> None:
        """Do what is due every second."""

    def judge(self, now: float, *, is_sure: bool) -> None:
        """Check whether there is trouble. Without `is_sure`, silence is not taken as trouble."""


class Agents:
    """Use this in `with`: at its end, no agent is left on a host that can be reached.

    Attributes:
        own: the name of this machine among the hosts.
        clocks: of the hosts.
        cut_off: the hosts that have perhaps not heard that they are not needed any more.
        heard: what takes in the messages of a kind, with the name of the host: "memory", "warm".
        connected: is called when there is a new agent on a host.
    """

    def __init__(self, own: str, live: str = "", *, says: bool = False) -> None:
        """No agent is started yet.

        Args:
            own: see above.
            live: the launcher's socket, which the agent here removes if the launcher was killed.
            says: the launcher's stderr stays open for the processes that remain.
        """
        self.own = own
        self.clocks: dict[str, HostClock] = {}
        self.cut_off: set[str] = set()
        self.heard: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self.connected: Callable[[str], None] = lambda host: None
        self._live, self._says = live, says
        self._connections: dict[str, Connection] = {}
        self._parting: list[Connection] = []
        self._held: set[str] = set()
        self._attempts: dict[str, Watched] = {}
        self._lock = threading.Lock()
        self._beaten = 0.0
        self._fault: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._none_of_job = ExitStack()
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._rouse()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
        for host in list(self._connections):
            self._part_with(host)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in self._parting:
            is_lost = connection.host != self.own and silence(connection) > SILENCE_SECONDS
            connection.close(0.0 if is_lost else max(0.0, deadline - time.monotonic()))
        self._parting.clear()
        self._none_of_job.close()
        os.close(self._awake)
        os.close(self._wake)

    def have(self, hosts: Iterable[str]) -> dict[str, Connection]:
        """Have an agent on each of these hosts, and return the connections. Call this in the main thread.

        One that has ended is replaced, and one that has fallen silent, unless an attempt must report that first. What
        it holds is left to the new one.

        Raises:
            LaunchError, OSError: ssh cannot be started here.
        """
        hosts = list(hosts)
        for host in hosts:
            connection = self._connections.get(host)
            if connection is not None and self._is_useless(connection):
                self.send(connection, {"memory": {"leave": 1}})
                self._part_with(host)
            if host not in self._connections:
                self._connect(host)
                self.connected(host)
        return {host: self._connections[host] for host in hosts}

    def hold(self, hosts: Iterable[str]) -> None:
        """Keep the agents of these hosts, also if no attempt needs them."""
        self._held = set(hosts)
        self.release()

    def release(self) -> None:
        """Let the agents end that are no longer needed."""
        with self._lock:
            needed = self._held.union(*(attempt.hosts for attempt in self._attempts.values()))
        for host in self._connections.keys() - needed:
            self._part_with(host)
        for connection in self._parting:
            connection.process.poll()

    def join(self, attempt: Watched) -> None:
        """From now on, this attempt gets the messages about it."""
        with self._lock:
            self._attempts[attempt.token] = attempt
        attempt.trouble = attempt.trouble or self._fault

    def part(self, attempt: Watched) -> None:
        """This attempt is no longer needed."""
        with self._lock:
            self._attempts.pop(attempt.token, None)
        self.release()

    def send(self, connection: Connection, message: Mapping[str, Any]) -> None:
        """Send a message to the agent at that connection, if it is there. Any thread may call."""
        with self._lock:
            if self._connections.get(connection.host) is connection:
                connection.send(message)
                is_sent = not connection.has_unsent
            else:
                is_sent = True
        if not is_sent:
            self._rouse()

    def tell(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """Send a message to the agents of these hosts. Any thread may call."""
        for host in hosts:
            if (connection := self._connections.get(host)) is not None:
                self.send(connection, message)

    def beat_soon(self) -> None:
        """Beat now instead of within a second."""
        self._beaten = 0.0
        self._rouse()

    def _is_useless(self, connection: Connection) -> bool:
        limit = PATIENCE_SECONDS if connection.host == self.own else SILENCE_SECONDS
        with self._lock:
            is_watched = any(one.is_kept and connection.host in one.hosts for one in self._attempts.values())
        is_silent = connection.has_spoken and silence(connection) > limit
        return connection.is_closed or (is_silent and not is_watched)

    def _connect(self, host: str) -> None:
        is_own, now = host == self.own, time.monotonic()
        wish: dict[str, Any] = {"silence_seconds": 0 if is_own else AGENT_SILENCE_SECONDS}
        said_to = []
        if is_own:
            wish["live"] = self._live
            with suppress(OSError):  # there may be no stderr
                said_to = [os.dup(2)] if self._says else []
            wish |= {"stderr": said_to[0]} if said_to else {}
        try:
            with STARTING:
                connection = connect(host, is_own, wish, now, descriptors=said_to)
                self._none_of_job.enter_context(left_out({connection.process.pid}))  # also if an attempt is running
        finally:
            for descriptor in said_to:
                os.close(descriptor)
        connection.answered_seconds = now
        with self._lock:
            self.clocks[host] = HostClock()
            self._connections[host] = connection
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
            self._thread.start()
        self._rouse()

    def leave_out(self, pid: int) -> None:
        """This process, which an agent here has started, is none of a job."""
        self._none_of_job.enter_context(left_out({pid}))

    def _part_with(self, host: str) -> None:
        """Disconnect. The agent is not waited for before the end of the job."""
        with self._lock:
            connection = self._connections.pop(host)
            if connection.is_closed or silence(connection) > SILENCE_SECONDS / 2:
                self.cut_off.add(host)
            connection.send({"bye": 1})
            connection.hang_up()
        self._parting.append(connection)

    def _rouse(self) -> None:
        """Have the thread check what is to be sent."""
        with suppress(BlockingIOError):
            os.write(self._wake, b"x")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # otherwise nobody would watch, or keep the agents from ending the job
            self._fault = f"the job is ended on all hosts, because it cannot be watched: {error!r}"
            for attempt in list(self._attempts.values()):
                attempt.trouble = self._fault
            raise

    def _serve(self) -> None:
        looked = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now - looked > _SUSPENDED_SECONDS:
                for connection in list(self._connections.values()):
                    connection.heard_seconds = connection.answered_seconds = now
            looked = now
            attempts = list(self._attempts.values())
            if now - self._beaten >= BEAT_SECONDS:
                self._beaten = now
                self.tell(list(self._connections), {"beat": now})
                for attempt in attempts:
                    attempt.beat()
            self._exchange(now, BEAT_SECONDS / 4)
            judged = time.monotonic()
            for attempt in attempts:
                # A wait in which this process was suspended may end without what has come meanwhile.
                attempt.judge(judged, is_sure=judged - now < _SUSPENDED_SECONDS)

    def _exchange(self, now: float, timeout_seconds: float) -> None:
        """Take in what arrives within that time, and send what waits."""
        with selectors.DefaultSelector() as ways:
            with self._lock:
                for connection in self._connections.values():
                    if connection.is_closed:
                        continue
                    connection.flush()
                    ways.register(connection.output, selectors.EVENT_READ, connection)
                    if connection.has_unsent:
                        ways.register(connection.input, selectors.EVENT_WRITE, None)
            ways.register(self._awake, selectors.EVENT_READ, None)
            for key, _ in ways.select(timeout_seconds):
                if key.data is not None:
                    for message in key.data.receive(time.monotonic()):
                        self._take(key.data, message, now)
                elif key.fd == self._awake:
                    os.read(self._awake, 1 << 12)

    def _take(self, connection: Connection, message: dict[str, Any], now: float) -> None:
        host, heard = connection.host, connection.heard_seconds
        if "echo" in message and self._connections.get(host) is connection:
            connection.answered_seconds = heard
            self.clocks[host].add(message["echo"], message["time"], heard)
            if self.clocks[host].num_echoes < _QUICK_BEATS:
                self.send(connection, {"beat": time.monotonic()})
        for kind, take in self.heard.items():
            if kind in message and self._connections.get(host) is connection:
                take(host, message[kind])
        attempt = self._attempts.get(message.get("attempt", ""))
        if attempt is not None:
            attempt.take(host, message, heard, now)


def silence(connection: Connection) -> float:
    """Return how long ago a host was last heard, in seconds."""
    return time.monotonic() - connection.heard_seconds
