"""The doorkeeper of a server: ZeroMQ asks it whether a peer may come in, before it reads anything else of the peer.

It speaks ZAP (https://rfc.zeromq.org/spec/27/), within the process. It answers while the server receives: a peer that
comes during a long computation of the server waits.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from mpitrain.serve.keys import ServerKeys
from mpitrain.serve.sockets import the_zmq

if TYPE_CHECKING:
    import zmq

    from mpitrain.serve.sockets import Socket

_DOMAIN = b"mpitrain"


class Doorkeeper:
    """Lets in the peers that have the workers' key.

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
        """Close; nobody can come in any more."""
        self.socket.close()

    def _knows(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            return len(credentials) == 1 and hmac.compare_digest(credentials[0], self._public)
        return mechanism == b"PLAIN" and len(credentials) == 2 and hmac.compare_digest(credentials[1], self._password)


def guard_server(socket: Socket, keys: ServerKeys, *, plain: bool) -> None:
    """Let a server's socket ask for proofs, before it is bound. Both sides must be `plain`, or neither."""
    zmq = the_zmq()
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if plain:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
