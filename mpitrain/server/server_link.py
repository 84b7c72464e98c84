"""ServerLink: the connections of a server to all its workers, and the authenticator that lets them in.

server.worker_link has the other side.
"""

from __future__ import annotations

import errno
import hmac
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from mpitrain.errors import WireError
from mpitrain.server.security import ServerKeys
from mpitrain.server.wire import (
    SILENCE_SECONDS,
    Message,
    MessageAssembly,
    Peer,
    SocketEvents,
    cannot_listen,
    frames,
    make_socket,
    the_zmq,
)

if TYPE_CHECKING:
    import zmq

    from mpitrain.server.wire import Socket

_DOMAIN = b"mpitrain"


class Authenticator:
    """Admits the peers that have the workers' key: ZeroMQ asks it before it reads anything else from a peer.

    It speaks ZAP (https://rfc.zeromq.org/spec/27/), within the process. It answers while the server receives: a peer
    that connects during a long computation of the server waits.

    Attributes:
        socket: has a question when it can be read.
        refused: the number of peers that were sent away. Peers that do not get as far as a question are not counted.
        refused_from: the IP address of the last of them; "" if there is none.
    """

    def __init__(self, context: zmq.Context[Socket], keys: ServerKeys) -> None:
        zmq = the_zmq()
        self.refused, self.refused_from = 0, ""
        self._public, self._password = keys.worker.worker_public, keys.worker.password
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer all questions that have come."""
        zmq = the_zmq()
        while self.socket.poll(0):
            version, number, domain, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            is_known = domain == _DOMAIN and self._knows(mechanism, credentials)
            if not is_known:
                self.refused, self.refused_from = self.refused + 1, address.decode().removeprefix("::ffff:")
            status, text = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            self.socket.send_multipart([version, number, status, text, b"", b""])

    def close(self) -> None:
        """Close; no further peer is admitted."""
        self.socket.close()

    def _knows(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            return len(credentials) == 1 and hmac.compare_digest(credentials[0], self._public)
        return mechanism == b"PLAIN" and len(credentials) == 2 and hmac.compare_digest(credentials[1], self._password)


def require_proof(socket: Socket, keys: ServerKeys, *, plain: bool) -> None:
    """Make a server's socket ask for proofs, before it is bound. Both sides must be `plain`, or neither."""
    zmq = the_zmq()
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if plain:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)


@dataclass(frozen=True)
class Disconnected:
    """A peer whose messages have come before will send no more."""

    peer: Peer
    why: str


Event: TypeAlias = Message | Disconnected

ENDED = "its connection has ended"

# Connections that have begun and not yet been accepted.
_BACKLOG = 512


class ServerLink:
    """Receives messages of workers, and notices when they are gone: the end of a connection at once, a lost host by
    silence.

    A peer proves that it has the workers' key before anything else from it is read. For use by one thread.

    Attributes:
        address: HOST:PORT where the server listens.
        frames: how many have come from each peer that is there: also the parts of a message that is not whole yet.
    """

    def __init__(
        self,
        address: str,
        keys: ServerKeys,
        most_bytes: int,
        *,
        plain: str = "",
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """
        Args:
            address: HOST:PORT of this machine. HOST may be *, for all its addresses; PORT may be *, for a free one.
            keys: the proofs. A peer needs `keys.worker`.
            most_bytes: the most bytes of arrays in a message.
            plain: "": all bytes are encrypted. Or the network interface to which this link is confined, without
                encryption; see server.security for those that are allowed.
            silence_seconds: a peer without a heartbeat for this time is gone.

        Raises:
            ConfigError: pyzmq is missing, or nothing can listen at this address.
        """
        zmq = self._zmq = the_zmq()
        self._most_bytes = most_bytes
        self._serial = 0
        self.frames = Counter[Peer]()
        self._assemblies: dict[Peer, MessageAssembly] = {}
        self._peer_at: dict[int, Peer] = {}  # by the descriptor of the connection
        self._closed: set[int] = set()  # descriptors that are of no connection now
        self._leaving: dict[Peer, str] = {}
        self._banned: set[Peer] = set()
        self._events: list[Event] = []
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, keys)
        self._socket = make_socket(self._context, zmq.ROUTER, silence_seconds, most_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        require_proof(self._socket, keys, plain=bool(plain))
        if plain:
            self._socket.setsockopt(zmq.BINDTODEVICE, plain.encode())
        self._changes = SocketEvents(self._context, self._socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise cannot_listen(address, OSError(error.errno, error.strerror)) from None
        self.address = _shown(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._poller = zmq.Poller()
        for one in self.sockets:
            self._poller.register(one, zmq.POLLIN)

    @property
    def sockets(self) -> list[Socket]:
        """The sockets that become readable when something has arrived, for wire.wait_for."""
        return [self._socket, self._changes.socket, self._authenticator.socket]

    @property
    def refused(self) -> int:
        """The number of peers that have shown another key."""
        return self._authenticator.refused

    @property
    def refused_from(self) -> str:
        """The IP address of the last of them; "" if there is none."""
        return self._authenticator.refused_from

    def receive(self, seconds: float) -> list[Event]:
        """Return what has arrived, in order. Wait up to `seconds` for the first event.

        Messages of a peer come before the event that it is gone. What it sends later comes from another peer.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._look()
            left = deadline - time.monotonic()
            if self._events or left <= 0:
                break
            self._poller.poll(1000 * left)
        events, self._events = self._events, []
        return events

    def send(self, peer: Peer, kind: str, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray] = ()) -> None:
        """Send a message, or nothing if the peer has gone. The arrays are copied before this returns.

        Raises:
            WireError: the message cannot be sent at all.
        """
        self._serial = (self._serial + 1) % 2**32
        for frame in frames(self._serial, kind, fields, arrays):
            try:
                self._socket.send_multipart([peer, frame], self._zmq.NOBLOCK)
            except self._zmq.ZMQError as error:
                if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                    return
                raise

    def close(self) -> None:
        """Close all connections. Sent messages are delivered first, for some seconds at most."""
        self._changes.close()
        self._socket.close()
        self._authenticator.close()
        self._context.term()

    def _look(self) -> None:
        """Process what has arrived: first the peers that are gone, then messages, which may be from such peers."""
        self._authenticator.answer()
        while True:
            for kind, descriptor in self._changes.take():
                self._change(kind, descriptor)
            if self._events:
                return
            try:
                parts = self._socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                break
            self._take(parts)
        for peer, why in self._leaving.items():
            self._forget(peer, why)
        self._leaving.clear()

    def _change(self, kind: int, descriptor: int) -> None:
        if kind == self._zmq.EVENT_ACCEPTED:
            self._closed.discard(descriptor)
            return
        self._closed.add(descriptor)
        peer = self._peer_at.pop(descriptor, None)
        if peer is not None:
            self._leaving[peer] = ENDED

    def _take(self, parts: list[Any]) -> None:
        peer = Peer(parts[0].bytes)
        if peer in self._banned:
            return
        self.frames[peer] += 1
        if peer not in self._assemblies:
            self._meet(peer, int(parts[0].get(self._zmq.SRCFD)))
        try:
            if len(parts) != 2:
                raise WireError(f"a message of {len(parts) - 1} parts came; allowed is 1")
            message = self._assemblies[peer].take(parts[1].buffer, peer)
        except WireError as error:
            self.send(peer, "refused", {"text": f"the server does not understand this worker: {error}"})
            self._forget(peer, str(error))
            self._banned.add(peer)
            return
        if message is not None:
            self._events.append(message)

    def _meet(self, peer: Peer, descriptor: int) -> None:
        """Remember the connection of a peer whose first frame has come."""
        self._assemblies[peer] = MessageAssembly(self._most_bytes)
        if descriptor in self._closed:
            self._leaving[peer] = ENDED
            return
        before = self._peer_at.get(descriptor)
        if before is not None:
            self._leaving[before] = ENDED
        self._peer_at[descriptor] = peer

    def _forget(self, peer: Peer, why: str) -> None:
        self._banned.discard(peer)
        del self.frames[peer]
        if self._assemblies.pop(peer, None) is not None:
            self._events.append(Disconnected(peer, why))


def _shown(endpoint: str) -> str:
    """Return HOST:PORT of an endpoint, without what IPv6 puts before an address of IPv4."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"{host.removeprefix('[::ffff:').removesuffix(']') if '.' in host else host}:{port}"
