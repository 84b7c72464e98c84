"""WorkerLink: the connection to a server, which may go away and come back, and for how long it has been silent."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.reading import shown, whole
from mpitrain.server.security import WorkerKey, way_to
from mpitrain.server.wire import (
    SILENCE_SECONDS,
    Message,
    MessageAssembly,
    Peer,
    SocketEvents,
    frames,
    make_socket,
    the_zmq,
)

if TYPE_CHECKING:
    from mpitrain.server.wire import Socket

# After this time without a connection, the server is looked for at the next address.
_PATIENCE_SECONDS = 3.0
# How long a message waits for a connection that is being made.
_CONNECT_SECONDS = 1.0
_RETRY_MS, _MOST_RETRY_MS = 100, 1000
_AGAIN = "Start this worker again when the server is running"


class WorkerLink:
    """Sends to a server, and receives from it. It connects by itself, again and again, until it is closed.

    What cannot be sent is dropped, and a message may be lost with its connection: ask again until an answer comes. For
    one thread.

    Attributes:
        address: HOST:PORT at which the server is expected now.
        connections: how often a connection has come about.
        frames: how many have come: also the parts of a message that is not whole yet.
        name: of the server, for messages.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: WorkerKey,
        most_bytes: int,
        *,
        plain: bool = False,
        name: str = "the server",
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """
        Args:
            addresses: where the server may be, as HOST:PORT.
            key: the proof, and what the server has to prove.
            most_bytes: the most bytes of arrays in a message.
            plain: nothing is encrypted, as the server must have it too.
            name: of the server.
            silence_seconds: a server that gives no sign of life for so long is connected to again.

        Raises:
            ConfigError: pyzmq is missing, or an address is malformed; or, also later, `plain` is set and the way to the
                server is a network that others can read.
        """
        self.name, self.frames = name, 0
        zmq = self._zmq = the_zmq()
        self._places = [parse_address(address) for address in addresses]
        self._key, self._plain, self._silence_seconds = key, plain, silence_seconds
        self._most_bytes = most_bytes
        self._serial = 0
        self._context = zmq.Context()
        self._candidates: list[tuple[str, str, int]] = []
        self._candidate, self._way = ("", "", 0), ""
        self.connections = 0
        self._connected = False
        self._failure = ""
        self._open: tuple[Socket, SocketEvents] | None = None
        self._look_elsewhere()

    def send(self, kind: str, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray] = ()) -> None:
        """Send a message, or nothing if there is no connection. The arrays are copied before this returns.

        Raises:
            WireError: the message cannot be sent to anybody.
        """
        self._serial = (self._serial + 1) % 2**32
        self._look()
        if not self._connected:
            self._wait(_CONNECT_SECONDS, for_message=False)
        for frame in frames(self._serial, kind, fields, arrays):
            try:
                self._socket.send(frame, self._zmq.NOBLOCK)
            except self._zmq.Again:
                return

    def receive(self, seconds: float) -> Message | None:
        """Return the next message. Wait up to `seconds` for it; None: none has come.

        Raises:
            WireError: the received message is malformed.
        """
        deadline = time.monotonic() + seconds
        while True:
            message = self._next()
            left = deadline - time.monotonic()
            if message is not None or left <= 0:
                return message
            self._wait(left, for_message=True)

    def trouble(self) -> str:
        """Return why no message comes, as far as this side can see. This may take some seconds."""
        self._look()
        name, ip, port = self._candidate
        where = self.address if name == ip else f"{self.address} ({ip})"
        if self._connected:
            return f"the server at {where} is running, but does not answer"
        if self._failure:
            return f"{where}: {self._failure}"
        if not ip:
            return f"the name {name} cannot be resolved"
        try:
            socket.create_connection((ip, port), _PATIENCE_SECONDS).close()
        except TimeoutError:
            return (
                f"nothing answers at {where}: the machine is off, or a firewall drops the packets; open the port on "
                f"the server's machine, for example: sudo ufw allow {port}/tcp"
            )
        except ConnectionRefusedError:
            return f"no program listens at {where}: the server has not begun, or has ended"
        except OSError as error:
            return f"{where} cannot be reached: {error.strerror or error}"
        return f"{where} accepts connections, but does not identify itself as the server"

    def close(self) -> None:
        """Close the connection. What was sent is delivered before, for some seconds at most."""
        self._shut()
        self._context.term()

    @property
    def sockets(self) -> list[Socket]:
        """See ServerLink. They are others when the server is looked for elsewhere."""
        assert self._open is not None
        return [self._open[1].socket, self._open[0]]

    @property
    def host(self) -> str:
        """The name, or the IP address, of the host on which the server is expected now."""
        return self._candidate[0]

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as of the last call."""
        return self._connected

    def has_stayed(self, connections: int) -> bool:
        """Whether the connection is still the one of that number. No message is read."""
        self._look()
        return self._connected and self.connections == connections

    @property
    def _socket(self) -> Socket:
        assert self._open is not None
        return self._open[0]

    def _next(self) -> Message | None:
        """Return the next message that is complete by now."""
        self._look()
        while True:
            try:
                parts = self._socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                return None
            for part in parts:
                self.frames += 1
                message = self._assembly.take(part.buffer, Peer(b""))
                if message is not None:
                    return message

    def _wait(self, seconds: float, *, for_message: bool) -> None:
        """Wait until something has come, or a connection has changed."""
        assert self._open is not None
        poller = self._zmq.Poller()
        poller.register(self._open[1].socket, self._zmq.POLLIN)
        if for_message:
            poller.register(self._socket, self._zmq.POLLIN)
        poller.poll(1000 * min(seconds, _PATIENCE_SECONDS))
        self._look()

    def _look(self) -> None:
        """Note changes of the connection. If the server has been away for long, look for it elsewhere."""
        assert self._open is not None
        zmq = self._zmq
        has_failed = False
        for kind, _ in self._open[1].take():
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._failure = True, ""
                self.connections += 1
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._failure = "the server does not accept this key; copy the line that it printed at its last start"
            elif kind in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                self._failure = (
                    "the program that listens there is not the server with this key. Is it another server or "
                    "program, or has only one side --plain?"
                )
            elif kind == zmq.EVENT_DISCONNECTED and self._connected:
                self._connected, self._since, self._failure = False, time.monotonic(), ""
            elif kind == zmq.EVENT_CLOSED and not self._connected:  # an attempt has failed before any handshake
                self._failure, has_failed = "", True
        if self._connected:
            return
        # A host may have addresses of several kinds, and the server listen at one: the others fail at once.
        if time.monotonic() - self._since > _PATIENCE_SECONDS or (has_failed and self._candidates):
            self._look_elsewhere()

    def _look_elsewhere(self) -> None:
        """Connect to the next address, or, after the last one, to the first, whose name is resolved again."""
        if not self._candidates:
            self._candidates = [candidate for place in self._places for candidate in _resolved(*place)]
        one_place = len(self._candidates) == 1 and len(self._places) == 1
        candidate = self._candidates.pop(0)
        self._since = time.monotonic()
        name, ip, port = candidate
        # A name may have other addresses now, and routes may have changed, so look before each attempt.
        way = way_to(ip) if self._plain and ip else ""
        if self._open is not None and one_place and candidate == self._candidate and way == self._way:
            return  # ZeroMQ itself tries again
        zmq = self._zmq
        self._shut()
        self._candidate, self._way = candidate, way
        self.address = f"{name}:{port}"
        self._connected, self._failure = False, ""
        self._assembly = MessageAssembly(self._most_bytes)
        made = make_socket(self._context, zmq.DEALER, self._silence_seconds, self._most_bytes)
        options = {
            zmq.IMMEDIATE: 1,  # nothing waits for a connection: it would come too late, and out of order
            zmq.CONNECT_TIMEOUT: int(1000 * _PATIENCE_SECONDS),
            zmq.RECONNECT_IVL: _RETRY_MS,
            zmq.RECONNECT_IVL_MAX: _MOST_RETRY_MS,
        }
        for option, value in options.items():
            made.setsockopt(option, value)
        self._prove(made)
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failures |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        events = SocketEvents(self._context, made, zmq.EVENT_HANDSHAKE_SUCCEEDED | failures)
        self._open = made, events
        if way:
            made.setsockopt(zmq.BINDTODEVICE, way.encode())  # also if the routes change later
        if ip and (way or not self._plain):
            made.connect(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")

    def _prove(self, made: Socket) -> None:
        zmq = self._zmq
        if self._plain:
            made.setsockopt(zmq.PLAIN_USERNAME, b"worker")
            made.setsockopt(zmq.PLAIN_PASSWORD, self._key.password)
            return
        made.setsockopt(zmq.CURVE_SERVERKEY, self._key.server_public)
        made.setsockopt(zmq.CURVE_PUBLICKEY, self._key.worker_public)
        made.setsockopt(zmq.CURVE_SECRETKEY, self._key.worker_secret)

    def _shut(self) -> None:
        if self._open is not None:
            made, events = self._open
            events.close()
            made.close()
            self._open = None


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a process waits for another one.

    Attributes:
        stall_seconds: after this time without an answer, a line names the process that is waited for.
        hang_seconds: after this time without any message, the wait ends; 0: never.
        say: prints a line.
        now: the clock, in seconds.
    """

    stall_seconds: float
    hang_seconds: float
    say: Callable[[str], None]
    now: Callable[[], float] = field(default=time.monotonic)


class Silence:
    """How long a server has not been heard from; a part of a large message also counts."""

    def __init__(self, link: WorkerLink, patience: Patience) -> None:
        self._link, self._patience = link, patience
        self._said = -math.inf
        self.end()

    def end(self) -> None:
        """Note that the server was heard from."""
        self._heard, self._frames = self._patience.now(), self._link.frames

    def look(self, name: str, kind: str = "worker", advice: str = _AGAIN) -> None:
        """Print that the process with this name, a worker or a server, is waiting.

        Raises:
            LaunchError: the server has not been heard from for `hang_seconds`. The text ends with the advice.
        """
        if self._link.frames != self._frames:
            self.end()
        most = self._patience.hang_seconds
        now = self._patience.now()
        silent = f"{name}: {self._link.name} has not been heard from for {now - self._heard:.0f} s"
        if most and now - self._heard > most:
            raise LaunchError(f"{silent} (MPITRAIN_HANG_SECONDS): {self._link.trouble()}. {advice}")
        if now - max(self._heard, self._said) >= min(self._patience.stall_seconds, most or math.inf):
            limit = f" until {most:.0f} s are over" if most else ""
            self._patience.say(f"{silent}: {self._link.trouble()}; this {kind} waits{limit}")
            self._said = self._patience.now()


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT". A host of colons is in brackets.

    Raises:
        ConfigError: it has another form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host.replace(":", " ")
    number = whole(port, 1, 65535)
    if not host or " " in host or number is None:
        raise ConfigError(f"the address {shown(address)} is malformed; it must be HOST:PORT, such as lab1:5000")
    return host, number


def _resolved(host: str, port: int) -> list[tuple[str, str, int]]:
    """Return name, IP address and port of each address of a host; "" for the address if there is none now."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [(host, "", port)]
    return [(host, str(answer[4][0]), port) for answer in answers]
