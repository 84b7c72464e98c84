"""Memory that outlives a rank: ranks hand its descriptors to the keeper of their host, and later ranks get them back.

    rank: {"keep": name}, with descriptors      keeper: {"kept": name}
    rank: {"names": 1}                          keeper: {"names": [name...]}
    rank: {"give": name}                        keeper: {"given": name}, with the descriptors; none are known: with none
    rank: {"only": [name...], "run": number}    keeper: {"dropped": [name...]}, of that run and earlier ones
    rank: {"wish": try}                         keeper: {"wish": one of the wishes below}
    rank: {"enter": try}                        keeper: {"entered": try}
    rank: {"leave": try, "step": number,        keeper: {"left": try}
           "ms": when, by time.time()}
    rank: {"follow": try}                       keeper: {"left": [step, ms]}, when the ranks of that attempt have left;
                                                        at once and with [], if none of them was on this host

The agent of the host (agent.py), and commands:

    {"lead": launcher}, with the launcher's     keeper: {"leads": the launcher whose agent it obeys: the first one,
           stderr if that is on this host               until its line closes, "pid": its process}
    {"tell": {"wish": ..., "of": try, "step":
           last step heard of}}, any of them,
           with a descriptor of the estate's
           text if there is a new one; without
           an answer
    {"pids": 1}                                 keeper: {"pids": processes of the ranks that copy their state}
    {"rename": name of the socket, "lead":      keeper: {"renamed": name}
           launcher}
    {"stay": 1}                                 keeper: {"stays": whether it holds something, and waits for another
                                                        launcher}
    {"estate": 1}                               keeper: {"step": last step heard of, and after the loss of the launcher
                                                        "lost_ms" and "until_ms", when it was and until when this is
                                                        kept, by time.time()}, with a descriptor of the estate's text
    {"drop": 1}                                 keeper: {"dropped": 1}, and it ends

An attempt is named by the id of its job. A name is that of a run and of what is kept of it: "1/state". The socket has a
name and no file (an abstract socket of unix(7)), and the memory has no name at all. So both are gone with the keeper,
however it ends.

Sent to the keepers as text. So this module imports only modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain.watching.sockets import accepted, listen, long_text, of_this_user, peer, receive, send, send_long, user_of

# The names of the keepers' sockets begin so.
KEEPER_PREFIX = "mpitrain-keeper-"

# What the launcher wishes of the ranks. LEAVES: after their next copy, they end, because the hosts of the job change.
# SAVES: the same, but no other try follows; they save. DIES: the job is ending; who has been told to end does so.
# PREPARES: the ranks of the next attempt are starting beside them; until these are ready, the training continues.
STAYS, LEAVES, SAVES, DIES, PREPARES = 0, 1, 2, -1, -2

_FIELDS = {
    **dict.fromkeys(("keep", "give", "wish", "enter", "leave", "follow", "lead", "rename"), str),
    **dict.fromkeys(("run", "step", "ms"), int),
    "only": list,
    "tell": dict,
}
_OF_TELL = {"wish": int, "of": str, "step": int}
_ANSWER_SECONDS = 10.0


class Kept:
    """The keeper's table of descriptors by name, and the socket at which ranks of the same user ask for them.

    Attributes:
        wish: what the launcher wishes of the ranks of an attempt.
        of: that attempt.
        estate: what a launcher needs to continue with the job, as JSON (keepers.py); "": it is not known.
        step: the last step that a rank has begun, as far as the launcher has heard.
        loss: when the launcher was lost, and until when this is kept: see "estate" above; empty while it is there.
        stderr: of the launcher, if that is on this host.
        is_dropped: somebody does not want it any more.
    """

    def __init__(self, name: str, is_taken: Callable[[], None] = lambda: None, keep_seconds: float = 900.0) -> None:
        """Make the socket. See sockets.listen. What it holds is kept for `keep_seconds` after a loss.

        Raises:
            OSError: the name stays taken.
        """
        self.name = name
        self.stderr: int | None = None
        self._keep_seconds = keep_seconds
        self.wish, self.of = STAYS, ""
        self.estate, self.step = "", 0
        self.loss: dict[str, int] = {}
        self.is_dropped = False
        self._leader: tuple[int, str] | None = None  # the descriptor of the agent's line, and its launcher
        self._ranks: dict[int, tuple[str, int]] = {}  # by descriptor of its line: the try of a rank, and its process
        self._tries: set[str] = set()  # those that have had ranks here
        self._left: dict[str, list[int]] = {}  # by try
        self._following: dict[int, str] = {}  # by descriptor of its line: the try for whose end a rank waits
        self._listener = listen(name, is_taken)
        self._events = select.epoll()
        self._events.register(self._listener.fileno(), select.EPOLLIN)
        self._lines: dict[int, socket.socket] = {}  # by descriptor
        self._table: dict[str, list[int]] = {}

    def fileno(self) -> int:
        """A descriptor for select: readable when there is something to do."""
        return self._events.fileno()

    def descriptors(self) -> list[int]:
        """Its open files, before anybody has called."""
        return [self._listener.fileno(), self._events.fileno()]

    def look(self) -> None:
        """Answer what ranks have asked so far."""
        for descriptor, _ in self._events.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif not self._answer(self._lines[descriptor]):
                self._events.unregister(descriptor)
                self._ranks.pop(descriptor, None)
                self._following.pop(descriptor, None)
                if self._leader is not None and self._leader[0] == descriptor:
                    self._leader = None
                self._lines.pop(descriptor).close()

    def pids(self) -> list[int]:
        """The processes of the ranks here that copy their state, of the try of which the launcher speaks."""
        return [pid for of, pid in self._ranks.values() if of == self.of]

    @property
    def has_memory(self) -> bool:
        """True if ranks have given it any. A rank that finds no room gives none under a name."""
        return any(self._table.values())

    @property
    def holds(self) -> bool:
        """True if another launcher could continue from what it has."""
        return self.has_memory and bool(self.estate)

    @property
    def is_led(self) -> bool:
        """True while an agent has its line here."""
        return self._leader is not None

    def lose(self) -> None:
        """Take note that the launcher was lost just now."""
        now = time.time()
        self.loss = {"lost_ms": int(1000 * now), "until_ms": int(1000 * (now + self._keep_seconds))}

    def close(self) -> None:
        """Close the socket and all descriptors."""
        for name in list(self._table):
            self._drop(name)
        for line in self._lines.values():
            line.close()
        self._listener.close()
        self._events.close()

    def _accept(self) -> None:
        for line in of_this_user(accepted(self._listener)):
            self._lines[line.fileno()] = line
            self._events.register(line.fileno(), select.EPOLLIN)

    def _answer(self, line: socket.socket) -> bool:
        """Answer one message; False: the rank has hung up, or what it says makes no sense."""
        descriptors: list[int] = []
        try:
            message, descriptors = receive(line)
            if not all(isinstance(value, _FIELDS.get(name, object)) for name, value in message.items()):
                return False
            if "keep" in message:
                int(message["keep"].partition("/")[0])  # the number of its run; ValueError: it is none
                self._drop(message["keep"])
                self._table[message["keep"]], descriptors = descriptors, []
                send(line, {"kept": message["keep"]})
            elif "give" in message:
                send(line, {"given": message["give"]}, self._table.get(message["give"], []))
            elif "only" in message:
                old = [name for name in self._table if int(name.partition("/")[0]) <= message["run"]]
                dropped = [name for name in old if name not in message["only"]]
                for name in dropped:
                    self._drop(name)
                send(line, {"dropped": dropped})
            elif "lead" in message and "rename" not in message:
                leader = message["lead"] if self._leader is None else self._leader[1]
                if leader == message["lead"]:
                    self._leader = line.fileno(), leader
                    if descriptors:
                        self._say_to(descriptors.pop())
                send(line, {"leads": leader, "pid": os.getpid()})
            elif "tell" in message or "rename" in message or "stay" in message or "pids" in message:
                if self._leader is None or self._leader[0] != line.fileno():
                    return False
                self._obey(line, message, descriptors)
            elif "wish" in message:
                send(line, {"wish": self.wish if message["wish"] == self.of else STAYS})
            elif "enter" in message:
                self._ranks[line.fileno()] = message["enter"], peer(line)[0]
                self._tries.add(message["enter"])
                send(line, {"entered": message["enter"]})
            elif "leave" in message:
                self._left[message["leave"]] = [int(message["step"]), int(message["ms"])]
                send(line, {"left": message["leave"]})
                self._let_follow()
            elif "follow" in message:
                self._following[line.fileno()] = message["follow"]
                self._let_follow()
            elif "names" in message:
                send(line, {"names": sorted(self._table)})
            elif "estate" in message:
                send_long(line, {"step": self.step, **self.loss}, self.estate)
            elif "drop" in message:
                self.is_dropped = True
                send(line, {"dropped": 1})
            else:
                return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _say_to(self, descriptor: int | None) -> None:
        if self.stderr is not None:
            os.close(self.stderr)
        self.stderr = descriptor

    def _obey(self, line: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
        """Do what the agent says."""
        if "tell" in message:
            told = message["tell"]
            if not all(isinstance(value, _OF_TELL[name]) for name, value in told.items()):
                raise ValueError("what the agent says makes no sense")
            self.wish, self.of = told.get("wish", self.wish), told.get("of", self.of)
            self.step = told.get("step", self.step)
            if descriptors:
                given, descriptors[:] = list(descriptors), []
                self.estate, self.loss = long_text(given), {}
        elif "rename" in message:
            listener = listen(message["rename"])
            self._events.register(listener.fileno(), select.EPOLLIN)
            self._events.unregister(self._listener.fileno())
            self._listener.close()
            self._listener, self.name = listener, message["rename"]
            self._leader = line.fileno(), message["lead"]
            send(line, {"renamed": self.name})
        elif "stay" in message:
            if self.holds:
                self.lose()
                self._say_to(None)  # the launcher reports it itself
            send(line, {"stays": self.holds})
        else:
            send(line, {"pids": self.pids()})

    def _let_follow(self) -> None:
        """Answer the ranks that wait for an attempt, if it has left, or has had no ranks here. A killed one never
        leaves.
        """
        for descriptor, of in list(self._following.items()):
            if of in self._left or of not in self._tries:
                del self._following[descriptor]
                with contextlib.suppress(OSError):  # it has gone; its connection reports that
                    send(self._lines[descriptor], {"left": self._left.get(of, [])})

    def _drop(self, name: str) -> None:
        for descriptor in self._table.pop(name, []):
            os.close(descriptor)


def drop(name: str) -> None:
    """End the keeper that has the name, if there is one: its launcher has given it up, and what it holds is older."""
    with contextlib.suppress(OSError), contextlib.closing(KeeperLine(name)) as line:
        line.drop()


class KeeperLine:
    """A line to the keeper of this host: of a rank, of the agent, or of a command.

    All methods raise OSError if the keeper does not answer.

    Attributes:
        pid: the process of the keeper, after `lead`.
    """

    def __init__(self, name: str, of: str = "", answer_seconds: float = _ANSWER_SECONDS) -> None:
        """`of` is the try of this rank; "": this is none."""
        self.pid = 0
        self._of, self._answer_seconds = of, answer_seconds
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._line.settimeout(answer_seconds)
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
        """What the launcher wishes of the ranks."""
        answer, _ = self._ask({"wish": self._of})
        return int(answer["wish"])

    def enter(self) -> None:
        """Say that this process is a rank that copies its state."""
        self._ask({"enter": self._of})

    def leave(self, step: int, ms: int) -> None:
        """Say that the ranks of this attempt have left after `step`, at `ms` by time.time(), in milliseconds."""
        self._ask({"leave": self._of, "step": step, "ms": ms})

    def follow(self, of: str) -> list[int]:
        """Wait until the ranks of that attempt have left. Return the numbers of `leave`; []: none was on this host."""
        self._line.settimeout(None)
        try:
            answer, _ = self._ask({"follow": of})
        finally:
            self._line.settimeout(self._answer_seconds)
        return list(answer["left"])

    def keep_only(self, names: Sequence[str], run: int) -> None:
        """Have the keeper drop everything else of this run and of earlier ones."""
        self._ask({"only": list(names), "run": run})

    def estate(self) -> tuple[dict[str, int], str]:
        """What the keeper answers about its job (see above), and the text of the estate; "": it has none."""
        about, descriptors = self._ask({"estate": 1})
        return about, long_text(descriptors)

    def lead(self, launcher: str, stderr: Sequence[int] = ()) -> str:
        """Have the keeper obey this line, until it closes. Return the launcher that leads, which may be another."""
        answer, _ = self._ask({"lead": launcher}, stderr)
        self.pid = int(answer["pid"])
        return str(answer["leads"])

    def tell(self, told: Mapping[str, Any], estate: str = "") -> None:
        """Tell the keeper, which does not answer, and is not waited for."""
        before = self._line.gettimeout()
        self._line.setblocking(False)
        try:
            if estate:
                send_long(self._line, {"tell": told}, estate)
            else:
                send(self._line, {"tell": told})
        finally:
            self._line.settimeout(before)

    def pids(self) -> list[int]:
        """The processes of the ranks that copy their state."""
        answer, _ = self._ask({"pids": 1})
        return list(answer["pids"])

    def rename(self, name: str, launcher: str) -> None:
        """Give the keeper's socket another name. `launcher` leads from now on."""
        self._ask({"rename": name, "lead": launcher})

    def stay(self) -> bool:
        """Have the keeper wait for another launcher. False: it holds nothing for that."""
        answer, _ = self._ask({"stay": 1})
        return bool(answer["stays"])

    def kill(self) -> None:
        """After `lead`: kill the keeper, which does not answer."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def drop(self) -> None:
        """Have the keeper end, with all that it holds."""
        self._ask({"drop": 1})

    def close(self) -> None:
        """Close the line. The keeper keeps what it was given."""
        self._line.close()

    def _ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        send(self._line, message, descriptors)
        return receive(self._line)
