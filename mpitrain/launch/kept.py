"""Memory that outlives a rank: ranks hand its descriptors to the keeper of their host, and later ranks get them back.

    rank: {"keep": name}, with descriptors      keeper: {"kept": name}
    rank: {"names": 1}                          keeper: {"names": [name...]}
    rank: {"give": name}                        keeper: {"given": name}, with the descriptors; none are known: with none
    rank: {"only": [name...], "run": number}    keeper: {"dropped": [name...]}, of that run and earlier ones
    rank: {"wish": 1}                           keeper: {"wish": STAYS, LEAVES, SAVES or DIES}

A name is that of a run and of what is kept of it: "1/state". The socket has a name and no file (an abstract socket of
unix(7)), and the memory has no name at all. So both are gone with the keeper, however it ends.

Sent to the keepers as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

# What the launcher wishes of the ranks. LEAVES: after their next copy, they end, because the hosts of the job change.
# SAVES: the same, but no other try follows; they save. DIES: the job is ending; who has been told to end does so.
STAYS, LEAVES, SAVES, DIES = 0, 1, 2, -1

_MOST_WAITING = 4096
_MESSAGE_BYTES = 1 << 16
_MOST_DESCRIPTORS = 2
_ANSWER_SECONDS = 10.0


class Kept:
    """The keeper's table of descriptors by name, and the socket at which ranks of the same user ask for them.

    Attributes:
        wish: what the launcher wishes of the ranks.
    """

    def __init__(self, name: str) -> None:
        """Make the socket.

        Raises:
            OSError: the name is taken.
        """
        self.wish = STAYS
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + name)
        self._listener.listen(_MOST_WAITING)
        self._listener.setblocking(False)
        self._events = select.epoll()
        self._events.register(self._listener.fileno(), select.EPOLLIN)
        self._lines: dict[int, socket.socket] = {}  # by descriptor
        self._table: dict[str, list[int]] = {}

    def fileno(self) -> int:
        """A descriptor for select: readable when there is something to do."""
        return self._events.fileno()

    def look(self) -> None:
        """Answer what ranks have asked so far."""
        for descriptor, _ in self._events.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif not self._answer(self._lines[descriptor]):
                self._events.unregister(descriptor)
                self._lines.pop(descriptor).close()

    def close(self) -> None:
        """Close the socket and all descriptors."""
        for name in list(self._table):
            self._drop(name)
        for line in self._lines.values():
            line.close()
        self._listener.close()
        self._events.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._listener.accept()
                if user_of(line) != os.geteuid():
                    line.close()
                    continue
                line.setblocking(False)
                self._lines[line.fileno()] = line
                self._events.register(line.fileno(), select.EPOLLIN)

    def _answer(self, line: socket.socket) -> bool:
        """Answer one message; False: the rank has hung up, or what it says makes no sense."""
        try:
            message, descriptors = receive(line)
            if "keep" in message:
                self._drop(message["keep"])
                self._table[message["keep"]] = descriptors
                send(line, {"kept": message["keep"]})
            elif "give" in message:
                send(line, {"given": message["give"]}, self._table.get(message["give"], []))
            elif "only" in message:
                old = [name for name in self._table if int(name.partition("/")[0]) <= message["run"]]
                dropped = [name for name in old if name not in message["only"]]
                for name in dropped:
                    self._drop(name)
                send(line, {"dropped": dropped})
            elif "wish" in message:
                send(line, {"wish": self.wish})
            elif "names" in message:
                send(line, {"names": sorted(self._table)})
            else:
                return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _drop(self, name: str) -> None:
        for descriptor in self._table.pop(name, []):
            os.close(descriptor)


class KeeperLine:
    """A rank's line to the keeper of its host. All methods raise OSError if the keeper does not answer."""

    def __init__(self, name: str) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._line.settimeout(_ANSWER_SECONDS)
            self._line.connect("\0" + name)
            if user_of(self._line) != os.geteuid():
                raise PermissionError(f"the keeper belongs to user {user_of(self._line)}")
        except OSError:
            self._line.close()
            raise

    def keep(self, name: str, descriptors: Sequence[int]) -> None:
        """Have the keeper keep these descriptors instead of those of the same name. The caller's own stay open."""
        self._ask({"keep": name}, descriptors)

    def names(self) -> list[str]:
        """The names of everything that is kept on this host."""
        answer, _ = self._ask({"names": 1})
        return list(answer["names"])

    def give(self, name: str) -> list[int]:
        """What is kept under a name, as new descriptors; [] if nothing is."""
        _, descriptors = self._ask({"give": name})
        return descriptors

    def wish(self) -> int:
        """What the launcher wishes of the ranks: STAYS, LEAVES, SAVES or DIES."""
        answer, _ = self._ask({"wish": 1})
        return int(answer["wish"])

    def keep_only(self, names: Sequence[str], run: int) -> None:
        """Have the keeper drop everything else of this run and of earlier ones."""
        self._ask({"only": list(names), "run": run})

    def close(self) -> None:
        """Close the line. The keeper keeps what it was given."""
        self._line.close()

    def _ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        send(self._line, message, descriptors)
        return receive(self._line)


def send(line: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with these descriptors."""
    rights = array.array("i", descriptors)
    line.sendmsg([json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message. Return it with its descriptors, which are new ones."""
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * struct.calcsize("i"))
    data, extra, _, _ = line.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    numbers = array.array("i")
    for _, _, rights in extra:
        numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
    if not data:
        raise ConnectionResetError("the other side has hung up")
    return json.loads(data), list(numbers)


def user_of(line: socket.socket) -> int:
    """The user at the other end."""
    data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    return int(struct.unpack("iII", data)[1])
