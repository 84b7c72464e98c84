"""ZeroMQ's sockets, as servers and workers need them: what they prove, how they notice a silent peer, their events."""

from __future__ import annotations

import errno
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from mpitrain.errors import ConfigError
from mpitrain.extras import missing
from mpitrain.serve.wire import CHUNK_BYTES, MOST_FRAME_BYTES

if TYPE_CHECKING:
    import zmq

    Socket: TypeAlias = zmq.Socket[bytes]

# A peer that is silent for so long has gone. Both sides send signs of life four times as often, from a thread of ZeroMQ
# that no computation delays.
SILENCE_SECONDS = 10.0
# What a socket that is closed may still send.
_LINGER_MS = 2000
# Frames of a peer that may wait besides those of one message.
_MOST_QUESTIONS = 64
_EVENT = struct.Struct("=Hi")
_numbers = itertools.count()


def the_zmq() -> ModuleType:
    """Return the module zmq.

    Raises:
        ConfigError: it cannot be imported, or cannot encrypt.
    """
    try:
        import zmq
    except ImportError as error:
        raise missing("a job with servers", "pyzmq", "serve", error) from None
    if not zmq.has("curve"):
        raise ConfigError(
            f"this build of ZeroMQ {zmq.zmq_version()} cannot encrypt (CURVE); install the one of the package index: "
            "pip install --force-reinstall 'mpitrain[serve]'"
        )
    return zmq


def make_socket(context: zmq.Context[Socket], kind: int, silence_seconds: float, most_bytes: int) -> Socket:
    """Return a socket for messages of serve.wire with so many bytes of arrays. It proves nothing yet.

    A message of each peer, and some questions, may wait until they are read. Then TCP stops the peer. Signs of life
    come behind what waits, so a program that computes for long before it reads must not stop them.
    """
    zmq = the_zmq()
    made: Socket = context.socket(kind)
    silence_ms = int(1000 * silence_seconds)
    options = {
        zmq.LINGER: _LINGER_MS,
        zmq.IPV6: 1,
        zmq.MAXMSGSIZE: MOST_FRAME_BYTES,
        zmq.RCVHWM: most_bytes // CHUNK_BYTES + _MOST_QUESTIONS,
        # What waits to be sent is bounded by what was asked for: one message for each question.
        zmq.SNDHWM: 0,
        zmq.HEARTBEAT_IVL: max(silence_ms // 4, 1),
        zmq.HEARTBEAT_TIMEOUT: silence_ms,
    }
    for option, value in options.items():
        made.setsockopt(option, value)
    return made


class SocketEvents:
    """The events of the connections of one socket."""

    def __init__(self, context: zmq.Context[Socket], watched: Socket, kinds: int) -> None:
        zmq = the_zmq()
        self._watched = watched
        address = f"inproc://events-{os.getpid()}-{next(_numbers)}"
        watched.monitor(address, kinds)
        self.socket: Socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        # ZeroMQ's thread must never wait until somebody reads an event.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def take(self) -> Iterator[tuple[int, int]]:
        """Yield the kind and the value of each event that has come."""
        zmq = the_zmq()
        while self.socket.poll(0):
            first, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            kind, value = _EVENT.unpack(first)
            yield kind, value

    def close(self) -> None:
        """Close, before the socket that is watched."""
        self._watched.disable_monitor()
        self.socket.close()


def wait_for(sockets: Iterable[Socket], seconds: float) -> None:
    """Wait up to `seconds` until one of these can be read."""
    zmq = the_zmq()
    poller = zmq.Poller()
    for one in sockets:
        poller.register(one, zmq.POLLIN)
    poller.poll(1000 * seconds)


def cannot_listen(address: str, error: OSError) -> ConfigError:
    """Return the error that says why nothing can listen at HOST:PORT, and what to do."""
    host, _, port = address.rpartition(":")
    text = f"nothing can listen at {address}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        text = (
            f"port {port} is in use on this machine, by another server perhaps; take another one, --port PORT, or end "
            f"the program that listens there: ss -ltnp sport = :{port}"
        )
    elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        text = f"{host} is no address of this machine; `ip -brief address` shows those that are"
    elif error.errno == errno.EACCES:
        text = f"this user may not listen at port {port}; take one from 1024 to 65535"
    return ConfigError(text)
