"""The path to another node: a listener on one node; connections, messages, pings and speed from the other."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children

_CONNECT_SECONDS = 3.0
_ECHOES = 20
_LARGE_BYTES = 1 << 17
# Few and small enough for a socket's buffer, so that none is lost on a node that has no time to receive them.
_DATAGRAMS = 64
_DATAGRAM_BYTES = 256
_ROOM_BYTES = 1 << 20
# Over a good path this takes milliseconds.
_STREAM_BYTES, _PIECE_BYTES, _STREAM_SECONDS = 1 << 19, 1 << 12, 4.0
# The places of these fields in struct tcp_info of linux/tcp.h.
_TOTAL_RETRANS, _SEGMENTS_OUT = 100, 136
_LATE_SECONDS = 0.5
_NO_ANSWER = re.compile(r"100% packet loss|, 0 received")
_TRIALS = 5
_TRIAL_SECONDS = 0.2
_BLOCK = bytes(1 << 18)
_MOST_BYTES = 1 << 25


def listen(wish: dict[str, Any]) -> int:
    """Accept a connection for `seconds`, at a free port, of `range` (low, high) if given. Return the port."""
    low, high = wish.get("range") or (0, -1)
    family, *_, own = socket.getaddrinfo(wish["address"], None, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family)
    for port in [*range(low, high + 1), 0]:
        with suppress(OSError):
            server.bind((own[0], port, *own[2:]))
            break
    server.listen(8)
    server.settimeout(wish["seconds"])
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    port_number: int = server.getsockname()[1]
    return port_number


def _serve(server: socket.socket) -> None:
    """Serve one connection: send back the bytes after `e`; discard and acknowledge the length after `s`.

    The acknowledgement has the nanoseconds that this waited for a processor.
    """
    with server, suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mode = connection.recv(1)
            buffer = bytearray(1 << 20)
            while mode == b"e":
                data = connection.recv(1 << 16)
                if not data:
                    return
                connection.sendall(data)
            while mode == b"s":
                left = int.from_bytes(receive(connection, 8), "big")
                waited = waited_seconds()
                while left:
                    count = connection.recv_into(buffer, min(left, len(buffer)))
                    if not count:
                        return
                    left -= count
                connection.sendall(int(1e9 * (waited_seconds() - waited)).to_bytes(8, "big"))


def waited_seconds() -> float:
    """Return how long this thread has waited for a processor so far; 0 if the kernel does not count that."""
    counted = facts.text("/proc/thread-self/schedstat").split()
    return int(counted[1]) / 1e9 if len(counted) == 3 else 0.0


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes."""
    data = b""
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 16))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def connect(address: str, port: int, mode: bytes) -> socket.socket:
    """Connect to the port that `listen` opened."""
    connection = socket.create_connection((address, port), _CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(mode)
    return connection


def reach(wish: dict[str, Any]) -> dict[str, Any]:
    """Try a connection to `port`. Return whether it works, round trips of small messages, and if large ones arrive."""
    answer: dict[str, Any] = {"connect": "ok", "found": ""}
    try:
        try:
            connection = connect(wish["address"], wish["port"], b"e")
        except (TimeoutError, socket.timeout):  # noqa: UP041 (as below): one try proves nothing
            connection = connect(wish["address"], wish["port"], b"e")
    except (TimeoutError, socket.timeout):  # noqa: UP041 (the same from Python 3.10 only)
        return {"connect": "timeout", "found": f"twice no answer within {_CONNECT_SECONDS:g} s"}
    except ConnectionRefusedError as error:
        return {"connect": "refused", "found": error.strerror}
    except OSError as error:
        return {"connect": "unreachable", "found": error.strerror or str(error)}
    with connection:
        try:
            answer["round_trips_seconds"] = [round_trip(connection, 64) for _ in range(_ECHOES)]
        except OSError as error:
            return {"connect": "lost", "found": str(error)}
        # A thread sends, because the replies must be received meanwhile.
        sender = threading.Thread(target=_send, args=(connection, bytes(_LARGE_BYTES)), daemon=True)
        sender.start()
        answer["large_bytes"] = 0
        with suppress(OSError):
            while answer["large_bytes"] < _LARGE_BYTES:
                answer["large_bytes"] += len(connection.recv(1 << 16)) or _LARGE_BYTES
        answer["large_is_complete"] = answer["large_bytes"] == _LARGE_BYTES
    return answer


def answer(wish: dict[str, Any]) -> str:
    """Return the result of a connection to a port: "ok", "refused", "timeout" or "unreachable"."""
    try:
        socket.create_connection((wish["address"], wish["port"]), _CONNECT_SECONDS).close()
    except (TimeoutError, socket.timeout):  # noqa: UP041 (the same from Python 3.10 only)
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "unreachable"
    return "ok"


def round_trip(connection: socket.socket, count: int) -> float:
    """Return the round-trip time of `count` bytes."""
    started = time.perf_counter()
    connection.sendall(bytes(count))
    receive(connection, count)
    return time.perf_counter() - started


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


def ping(wish: dict[str, Any]) -> dict[str, Any]:
    """Return whether packets of the route's full size (`mtu_bytes`) get through; if not, whether small ones do."""
    payload_bytes = wish["mtu_bytes"] - (48 if ":" in wish["address"] else 28)  # without the headers of IP and ICMP
    large = _ping(wish["address"], payload_bytes, 1)
    if large is False:  # some may be lost
        large = _ping(wish["address"], payload_bytes, 4)
    small = True if large else _ping(wish["address"], 56, 4)
    return {"large": large, "small": small}


def _ping(address: str, payload_bytes: int, count: int) -> bool | None:
    """True if any ping comes back; None if it cannot be tried."""
    options = ["-n", "-M", "do", "-i", "0.3", "-W", "1", "-c", str(count), "-s", str(payload_bytes)]
    code, out, _err = children.run(["ping", *options, address], count * 2.0 + 1.0)
    return None if code == 127 or "packets transmitted" not in out else not _NO_ANSWER.search(out)


_open: dict[int, socket.socket] = {}  # by port, until its datagrams are counted


def open_room(wish: dict[str, Any]) -> int:
    """Open a socket at which the kernel queues the datagrams sent to wish["address"]. Return the port."""
    family, *_, own = socket.getaddrinfo(wish["address"], None, type=socket.SOCK_DGRAM)[0]
    room = socket.socket(family, socket.SOCK_DGRAM)
    room.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
    room.bind((own[0], 0, *own[2:]))
    port: int = room.getsockname()[1]
    _open[port] = room
    return port


def send_datagrams(wish: dict[str, Any]) -> int:
    """Send datagrams, each with its number, to wish["address"] and "port". Return how many; none is sent again."""
    family, *_, peer = socket.getaddrinfo(wish["address"], wish["port"], type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        for number in range(_DATAGRAMS):
            with suppress(PermissionError):  # a filter of this node itself drops it
                way.sendto(number.to_bytes(_DATAGRAM_BYTES, "big"), peer)
            time.sleep(0.001)
    return _DATAGRAMS


def count_datagrams(wish: dict[str, Any]) -> int:
    """Return how many of them came to wish["port"]."""
    numbers: set[bytes] = set()
    with _open.pop(wish["port"]) as room, suppress(OSError):
        room.settimeout(_LATE_SECONDS)
        while len(numbers) < _DATAGRAMS:
            numbers.add(room.recv(_DATAGRAM_BYTES))
    return len(numbers)


def send_stream(wish: dict[str, Any]) -> dict[str, int]:
    """Send over TCP to wish["address"] and "port", for some seconds at most.

    Return how many segments were sent, and how many of them again; none if the kernel does not provide this.
    """
    deadline = time.monotonic() + _STREAM_SECONDS
    with connect(wish["address"], wish["port"], b"s") as connection:
        with suppress(OSError):
            connection.sendall(_STREAM_BYTES.to_bytes(8, "big"))
            for _ in range(_STREAM_BYTES // _PIECE_BYTES):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                connection.sendall(bytes(_PIECE_BYTES))
            receive(connection, 8)
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    if len(told) < _SEGMENTS_OUT + 4:
        return {"segments": 0, "again": 0}
    segments, again = (struct.unpack_from("I", told, place)[0] for place in (_SEGMENTS_OUT, _TOTAL_RETRANS))
    return {"segments": segments, "again": again}


def way(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the best of some trials to each port that `listen` opened at `address`: echoes, and bytes per second.

    "waited" is the part of the trials' time in which the threads at both ends waited for a processor.
    """
    with connect(wish["address"], wish["echo_port"], b"e") as connection:
        latency = min(round_trip(connection, 8) for _ in range(50)) / 2
    best, there = 0.0, 0.0
    with connect(wish["address"], wish["sink_port"], b"s") as connection:
        connection.settimeout(10.0)
        _push(connection, len(_BLOCK))  # TCP starts slowly
        count = len(_BLOCK)
        begun, waited = time.perf_counter(), waited_seconds()
        for _ in range(_TRIALS):
            seconds, waited_there = _push(connection, count)
            there += waited_there
            best = max(best, count / seconds)
            # Enough data that a trial takes its time on slow and fast links.
            count = int(min(max(best * _TRIAL_SECONDS, len(_BLOCK)), _MOST_BYTES)) // len(_BLOCK) * len(_BLOCK)
    shares = [part / (time.perf_counter() - begun) for part in (waited_seconds() - waited, there)]
    return {"latency_seconds": latency, "bytes_per_second": best, "waited": shares}


def _push(connection: Any, count: int) -> tuple[float, float]:
    """Return how long `count` bytes take to arrive there, and how long the receiver waited for a processor."""
    started = time.perf_counter()
    connection.sendall(count.to_bytes(8, "big"))
    for _ in range(count // len(_BLOCK)):
        connection.sendall(_BLOCK)
    waited = receive(connection, 8)
    return time.perf_counter() - started, int.from_bytes(waited, "big") / 1e9


CALLS = {
    "send_stream": send_stream,
    "listen": listen,
    "reach": reach,
    "answer": answer,
    "ping": ping,
    "open_room": open_room,
    "send_datagrams": send_datagrams,
    "count_datagrams": count_datagrams,
    "way": way,
}
