"""A minimal plain link, until that of the transport is there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import zmq
from zmq.utils.monitor import recv_monitor_message

Peer = bytes


@dataclass(frozen=True)
class Message:
    peer: bytes
    kind: str
    fields: dict[str, Any]
    arrays: list[numpy.ndarray]


@dataclass(frozen=True)
class Gone:
    peer: bytes
    why: str


def _frames(kind: str, fields: dict[str, Any], arrays: Sequence[numpy.ndarray]) -> list[Any]:
    header = {"kind": kind, "fields": fields, "arrays": [[str(a.dtype), list(a.shape)] for a in arrays]}
    return [json.dumps(header).encode(), *(numpy.ascontiguousarray(a).view(numpy.uint8).tobytes() for a in arrays)]


def _message(peer: bytes, frames: list[bytes]) -> Message:
    header = json.loads(frames[0])
    arrays = [
        numpy.frombuffer(frame, dtype).reshape(shape)
        for frame, (dtype, shape) in zip(frames[1:], header["arrays"], strict=True)
    ]
    return Message(peer, header["kind"], header["fields"], arrays)


class ServerLink:
    def __init__(self, address: str, keys: Any, most_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._peer_of: dict[int, bytes] = {}
        self._socket.bind(f"tcp://{address}")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def receive(self, seconds: float) -> list[Message | Gone]:
        deadline = time.monotonic() + seconds
        events: list[Message | Gone] = []
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not events:
            left = deadline - time.monotonic()
            if left < 0 and seconds:
                break
            poller.poll(int(max(0, 1000 * left)))
            while self._socket.poll(0):
                peer, *frames = self._socket.recv_multipart(copy=False)
                self._peer_of[peer.get(zmq.SRCFD)] = peer.bytes
                events.append(_message(peer.bytes, [frame.bytes for frame in frames]))
            while self._monitor.poll(0):
                fd = recv_monitor_message(self._monitor)["value"]
                if fd in self._peer_of:
                    events.append(Gone(self._peer_of.pop(fd), "its connection has ended"))
        return events

    def send(self, peer: Any, kind: str, fields: dict[str, Any], arrays: Sequence[numpy.ndarray] = ()) -> None:
        self._socket.send_multipart([peer, *_frames(kind, fields, arrays)])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


class WorkerLink:
    def __init__(self, addresses: Sequence[str], key: Any, most_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.connect(f"tcp://{addresses[0]}")

    def send(self, kind: str, fields: dict[str, Any], arrays: Sequence[numpy.ndarray] = ()) -> None:
        self._socket.send_multipart(_frames(kind, fields, arrays))

    def receive(self, seconds: float) -> Message | None:
        if not self._socket.poll(int(1000 * seconds)):
            return None
        return _message(b"", self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close()
        self._context.term()
