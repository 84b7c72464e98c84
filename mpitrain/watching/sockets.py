"""Sockets between the processes of one host: messages of JSON with descriptors, and who is at the other end.

A socket with a name and no file (an abstract socket of unix(7)) is gone with its process, however that ends. Any user
may connect to it, so both sides check the other's user: `of_this_user`, `call`.

The text of this module is sent to other hosts. So it imports only a module that is sent with it, and must run with old
Pythons.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpitrain.reading import message_of

_MOST_WAITING = 4096
_MESSAGE_BYTES = 1 << 16
_MOST_DESCRIPTORS = 4
# A process of the same job that was cut off from the launcher may be about to end, and to free the name.
_NAME_SECONDS = 5.0


def listen(name: str, is_taken: Callable[[], None] = lambda: None) -> socket.socket:
    """Make the abstract socket of this name, to which processes of this host can connect.

    While another process has the name, `is_taken` is called before each further attempt.

    Raises:
        OSError: the name stays taken.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            listener.bind("\0" + name)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                listener.close()
                raise
            is_taken()
            time.sleep(0.1)
    listener.listen(_MOST_WAITING)
    listener.setblocking(False)
    return listener


def accepted(listener: socket.socket) -> list[socket.socket]:
    """Accept all connections to a non-blocking socket. The connections do not block either."""
    lines = []
    with contextlib.suppress(BlockingIOError):
        while True:
            line, _ = listener.accept()
            line.setblocking(False)
            lines.append(line)
    return lines


def of_this_user(lines: Iterable[socket.socket]) -> list[socket.socket]:
    """Return the connections to processes of this user, and close the others."""
    own = []
    for line in lines:
        if user_of(line) == os.geteuid():
            own.append(line)
        else:
            line.close()
    return own


def peer(line: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, at the time when it began to listen or connected."""
    data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, user, group = struct.unpack("iII", data)
    return pid, user, group


def user_of(line: socket.socket) -> int:
    """The user at the other end."""
    return peer(line)[1]


def send(line: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with these descriptors."""
    rights = array.array("i", descriptors)
    line.sendmsg([json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message. Return it with its descriptors, which are new ones.

    Raises:
        OSError: the other side has hung up.
        ValueError: the received data is not a message.
    """
    data, numbers = receive_bytes(line)
    try:
        if not data:
            raise ConnectionResetError("the other side has hung up")
        return message_of(data), numbers
    except (OSError, ValueError):
        for number in numbers:
            os.close(number)
        raise


def receive_bytes(line: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for the next bytes, with their descriptors. b"": the other side has hung up."""
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * struct.calcsize("i"))
    data, extra, _, _ = line.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    numbers = array.array("i")
    for _, _, rights in extra:
        numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
    return data, list(numbers)


def send_long(line: socket.socket, message: Mapping[str, Any], text: str) -> None:
    """Send a message with a text of any length. The message alone must be short."""
    memory = os.memfd_create("mpitrain-text")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(text.encode())
        send(line, message, [memory])
    finally:
        os.close(memory)


def long_text(descriptors: Sequence[int]) -> str:
    """The text that came with a message; "": it has none."""
    texts = []
    for descriptor in descriptors:
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)  # the sender has written it with the same position
            texts.append(file.read().decode())
    return "".join(texts)
