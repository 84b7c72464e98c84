"""Messages between servers and workers, and the ZeroMQ sockets that carry them.

A message is a sequence of frames: a JSON header, then the bytes of arrays. It is never a pickle.

    first frame:   serial, 0, magic, JSON: {"kind": "unit", "fields": {...}, "arrays": [["float32", [3, 4]], ...]}
    other frames:  serial, 1 2 3 ..., at most CHUNK_BYTES of the arrays' bytes, one after the other, each aligned

Each frame is sent separately. So a link can bound the size of a frame, and still carry any array; another message, such
as a heartbeat, does not wait for the end of a large one; and memory is allocated only for a header that has been
checked.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NewType, TypeAlias

import ml_dtypes
import numpy

from mpitrain.errors import ConfigError, WireError
from mpitrain.extras import missing
from mpitrain.reading import json_of

if TYPE_CHECKING:
    import zmq

    Socket: TypeAlias = zmq.Socket[bytes]

# A connection, as a server knows it. A worker that comes back is another peer.
Peer = NewType("Peer", bytes)

CHUNK_BYTES = 2**18
MOST_HEADER_BYTES = 2**22
# The largest frame of all.
MOST_FRAME_BYTES = MOST_HEADER_BYTES + 64
# In the machine's own byte order, like the arrays: a machine with the other order is refused.
_PREFIX = struct.Struct("=II")
_MAGIC = struct.pack("=I", 0x4D545701)
_ALIGNMENT = 64
_MOST_DIMENSIONS = 32

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: numpy.dtype(name) for name in _NAMES.split()} | {"bfloat16": numpy.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Message:
    """A received message.

    Attributes:
        peer: the connection that it came from; b"" for a worker, which has only one.
        fields: from JSON.
        arrays: of the dtypes of DTYPES. They belong to the receiver.
    """

    peer: Peer
    kind: str
    fields: dict[str, Any]
    arrays: list[numpy.ndarray]


def number_in(fields: Mapping[str, Any], name: str) -> int:
    """Return a whole number from the fields of a message; -1: there is none. The message is not trusted."""
    value = fields.get(name)
    return value if type(value) is int else -1  # True is an int for isinstance


def frames(serial: int, kind: str, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray] = ()) -> Iterator[bytes]:
    """Yield the frames of a message. The arrays are read until the last frame is there.

    Args:
        serial: different from that of the previous message on this connection.
        kind: of the message.
        fields: JSON values, with text as keys.
        arrays: of any shapes and strides, of the dtypes of DTYPES.

    Raises:
        WireError: a dtype is not allowed, or the fields are too large.
    """
    flats: list[numpy.ndarray] = []
    described = []
    for array in arrays:
        if array.dtype.name not in DTYPES:
            raise WireError(f"an array is {array.dtype}; allowed are {', '.join(DTYPES)}")
        flat = numpy.ascontiguousarray(array, DTYPES[array.dtype.name]).reshape(-1)
        described.append([array.dtype.name, list(array.shape)])
        flats += (flat.view(numpy.uint8), numpy.zeros(-flat.nbytes % _ALIGNMENT, numpy.uint8))
    header = json.dumps(
        {"kind": kind, "fields": dict(fields), "arrays": described}, ensure_ascii=False, separators=(",", ":")
    ).encode()
    if len(header) > MOST_HEADER_BYTES:
        raise WireError(f"the fields of a message {kind!r} are {len(header)} bytes; allowed are {MOST_HEADER_BYTES}")
    yield b"".join([_PREFIX.pack(serial, 0), _MAGIC, header])
    for index, parts in enumerate(_chunks(flats), 1):
        yield b"".join([_PREFIX.pack(serial, index), *parts])


def _chunks(flats: Sequence[numpy.ndarray]) -> Iterator[list[memoryview]]:
    """Yield the content of each frame: parts of the flat arrays, CHUNK_BYTES in all but the last."""
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for flat in flats:
        view = flat.data
        while len(view):
            parts.append(view[:room])
            view = view[room:]
            room -= len(parts[-1])
            if not room:
                yield parts
                parts, room = [], CHUNK_BYTES
    if parts:
        yield parts


class MessageAssembly:
    """Assembles messages from the frames of one connection.

    A connection may break in the middle of a message, and the rest come on the next one. Such frames are dropped.
    """

    def __init__(self, most_bytes: int) -> None:
        """At most `most_bytes` of arrays are allowed in a message."""
        self._most_bytes = most_bytes
        self._serial = -1
        self._index = self._done = 0
        self._head: tuple[str, dict[str, Any]] = ("", {})
        self._arrays: list[tuple[numpy.dtype, tuple[int, ...], int]] = []
        self._bytes = numpy.empty(0, numpy.uint8)

    def take(self, frame: memoryview, peer: Peer) -> Message | None:
        """Add a frame. Return the message that it completes, if any.

        Raises:
            WireError: the frame is malformed, or the message would be too large. No memory was allocated for it.
        """
        if not _PREFIX.size <= frame.nbytes <= MOST_FRAME_BYTES:
            raise WireError(f"a frame has {frame.nbytes} bytes; allowed are {_PREFIX.size} to {MOST_FRAME_BYTES}")
        serial, index = _PREFIX.unpack_from(frame)
        rest = frame[_PREFIX.size :]
        if index == 0:
            self._begin(serial, rest)
        elif (serial, index) == (self._serial, self._index + 1):
            self._index = index
            self._add(rest)
        else:  # of a message whose beginning went to another connection
            self._serial = -1
        if self._serial == -1 or self._done < self._bytes.size:
            return None
        return self._complete(peer)

    def _begin(self, serial: int, rest: memoryview) -> None:
        self._serial = -1
        if rest[: len(_MAGIC)] != _MAGIC:
            raise WireError(
                f"a message begins with {bytes(rest[: len(_MAGIC)])!r}, and this version of mpitrain on this kind of "
                f"machine writes {_MAGIC!r}; both sides must have the same"
            )
        kind, fields, described = _header(rest[len(_MAGIC) :])
        self._arrays, total, padded = [], 0, 0
        for entry in described:
            dtype, shape = _array(entry, self._most_bytes)
            nbytes = math.prod(shape) * dtype.itemsize
            self._arrays.append((dtype, shape, padded))
            total += nbytes
            padded += nbytes + -nbytes % _ALIGNMENT
        if total > self._most_bytes:
            raise WireError(f"a message {kind!r} has {total} bytes of arrays; allowed are {self._most_bytes}")
        self._head = (kind, fields)
        self._bytes = numpy.empty(padded, numpy.uint8)
        self._serial, self._index, self._done = serial, 0, 0

    def _add(self, rest: memoryview) -> None:
        wanted = min(CHUNK_BYTES, self._bytes.size - self._done)
        if rest.nbytes != wanted:
            self._serial = -1
            raise WireError(f"a frame has {rest.nbytes} bytes of arrays; {wanted} were announced")
        self._bytes[self._done : self._done + wanted] = rest
        self._done += wanted

    def _complete(self, peer: Peer) -> Message:
        self._serial = -1
        arrays = []
        for dtype, shape, begin in self._arrays:
            part = self._bytes[begin : begin + math.prod(shape) * dtype.itemsize]
            if dtype.kind == "b" and part.size and part.max() > 1:
                raise WireError("an array of bool has bytes other than 0 and 1")
            arrays.append(part.view(dtype).reshape(shape))
        kind, fields = self._head
        self._bytes = numpy.empty(0, numpy.uint8)
        return Message(peer, kind, fields, arrays)


def _header(text: memoryview) -> tuple[str, dict[str, Any], list[Any]]:
    # Escapes may make halves of characters, which no terminal and no file takes.
    header = json_of(bytes(text), WireError, "the header of a message", form="is no JSON", any_number=True)
    if header.keys() == {"kind", "fields", "arrays"}:
        kind, fields, arrays = header["kind"], header["fields"], header["arrays"]
        if isinstance(kind, str) and isinstance(fields, dict) and isinstance(arrays, list):
            return kind, fields, arrays
    raise WireError("the header of a message is JSON without kind (text), fields (object) and arrays (list)")


def _array(entry: Any, most_bytes: int) -> tuple[numpy.dtype, tuple[int, ...]]:
    """Return dtype and shape of an announced array, whose bytes may still be too many."""
    dtype = shape = None
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], list):
        dtype, shape = DTYPES.get(entry[0]), entry[1]
    if dtype is None or shape is None or len(shape) > _MOST_DIMENSIONS:
        raise WireError(
            f"an array is announced as {str(entry)[:100]}; allowed are dtype and shape of {', '.join(DTYPES)}"
        )
    if not all(type(length) is int and 0 <= length <= most_bytes for length in shape):
        raise WireError(f"an array is announced with the shape {str(shape)[:100]}; each length is 0 to {most_bytes}")
    # NumPy counts the strides of an empty array as if its zeros were ones.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > max(most_bytes, 64):
        raise WireError(f"an array is announced with the shape {str(shape)[:100]}; allowed are {most_bytes} bytes")
    return dtype, tuple(shape)


# A peer that is silent for this long is gone. Both sides send heartbeats four times as often, from a thread of ZeroMQ
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
    """Return a socket for messages of server.wire with at most this many bytes of arrays. It has no proofs yet.

    A message of each peer, and some questions, may wait until they are read. Then TCP stops the peer. Heartbeats queue
    behind waiting messages, so a program that computes for long before it reads must not block them.
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
        # ZeroMQ's thread must never wait until an event is read.
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
    """Return the error that explains why nothing can listen at HOST:PORT, and what to do."""
    host, _, port = address.rpartition(":")
    text = f"nothing can listen at {address}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        text = (
            f"port {port} is in use on this machine, perhaps by another server; use another one (--port PORT), or end "
            f"the program that listens there: ss -ltnp sport = :{port}"
        )
    elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        text = f"{host} is not an address of this machine; `ip -brief address` shows those that are"
    elif error.errno == errno.EACCES:
        text = f"this user may not listen at port {port}; use one from 1024 to 65535"
    return ConfigError(text)
