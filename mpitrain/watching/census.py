"""The ranks of a job on this host, as its guard sees them: what they say, and who has ended, in which order.

    rank     pid   parent  line    process  phase
    0        4101  4090    open    alive    begun
    1        4102  4090    2nd     3rd      begun     <- the first end of all: rank 1
    2        4103  4090    4th     5th      begun
    parent   4090                  alive

The first is the culprit: mpiexec ends the others within a millisecond, and may then name any of them (MPICH's does so
now and then). epoll gives what has happened in the order in which it happened, however late the guard looks (Linux,
epoll(7), pidfd_open(2)). Two things are watched of a rank. Its line (roll_call.py) breaks while the kernel closes the
files of the process, which is when mpiexec learns of it. The process ends a little later; on a loaded machine that may
be after the end of those that mpiexec has ended because of it. The process whose children the ranks are, mpiexec or its
daemon, ends after them; where it ends before, it is the culprit, and no rank is.

Sent to other hosts as text: it imports nothing of ours but what comes with it, and runs with an old Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.watching.rank_record import DONE, RankRecord, read_record
from mpitrain.watching.roll_call import listen, receive
from mpitrain.watching.view import RankView, waited

# At a job's end its ranks may be orphans for a moment.
_ORPHAN_SECONDS = 1.0
_PIDFD_OPEN = 434  # the system call's number, on all processors


class _Process:
    """A process, and its end. With a descriptor epoll tells the end; without, on an old kernel, looking does."""

    def __init__(self, pid: int, descriptor: int | None) -> None:
        self.pid, self.descriptor = pid, descriptor
        self.order: int | None = None  # of its end, among all that has been seen to end
        self.ended_at = 0.0
        self._began = _began(pid)

    def is_gone(self) -> bool:
        began = _began(self.pid)
        return not began or began != self._began


@dataclass
class _Rank:
    """A rank: its process, what started that, and its line."""

    number: int
    process: _Process
    parent: _Process | None
    page: int | None  # descriptor of its record; None: it has none yet
    record: RankRecord  # as it was last read
    line_order: int | None = None  # of the end of its line, as in _Process
    line_ended_at: float = 0.0
    moved: tuple[int, float, float] = (-1, 0.0, 0.0)  # what has moved in which wait, and when last


@dataclass(frozen=True)
class FirstEnd:
    """The first end of all.

    Attributes:
        rank: that ended; None: a process that had started ranks did.
        parent_of: the ranks that this process had started.
        seconds: when, by time.monotonic().
        pid: of the process, as it is called on its host.
        kernel: what the kernel says of its end; empty: nothing, or nobody has asked yet.
    """

    rank: int | None
    parent_of: tuple[int, ...]
    seconds: float
    pid: int = 0
    kernel: str = ""


class Census:
    """One table of all ranks of a job that are on this host."""

    def __init__(self, roll_call: str) -> None:
        """Make the socket at which the ranks call.

        Raises:
            OSError: see roll_call.listen.
        """
        self._listener = listen(roll_call)
        self._events = select.epoll()
        self._events.register(self._listener.fileno(), select.EPOLLIN)
        self._lines: dict[int, socket.socket] = {}  # by descriptor, until the rank has said who it is
        self._ranks: dict[int, _Rank] = {}
        self._parents: dict[int, _Process] = {}
        self._watched: dict[int, Any] = {}  # by descriptor: a _Process, or a _Rank with its line
        self._unwatched: list[_Process] = []  # without a descriptor
        self._num_ended = 0
        self._order_is_known = True

    def fileno(self) -> int:
        """For select: readable when there is something to look at."""
        return self._events.fileno()

    def look(self) -> None:
        """Take in what has happened."""
        for descriptor, _ in self._events.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._lines:
                self._introduce(self._lines.pop(descriptor))
            else:
                self._take_end(self._watched.pop(descriptor), descriptor)
        for process in [process for process in self._unwatched if process.is_gone()]:
            self._unwatched.remove(process)
            self._order_is_known = False
            self._mark(process)

    def views(self) -> list[RankView]:
        """All of them, in order, as they are now."""
        return [self._view(rank) for _, rank in sorted(self._ranks.items())]

    def first_end(self) -> FirstEnd | None:
        """What ended first; None: nothing yet, or it is not known. Ranks that had come to their end do not
        count, nor do those without which the others go on."""
        lost = {number for rank in self._ranks.values() for number in self._read(rank).lost}
        ended = [rank for rank in self._ranks.values() if rank.process.order is not None and rank.number not in lost]
        ended = [rank for rank in ended if self._read(rank).phase != DONE] or ended
        if not self._order_is_known:
            return None
        first = min(ended, key=_order, default=None)
        for parent in self._parents.values():
            children = [rank for rank in self._ranks.values() if rank.parent is parent]
            orphans = tuple(rank.number for rank in children if _outlived(rank, parent))
            if orphans and (first is None or (parent.order or 0) < (first.process.order or 0)):
                return FirstEnd(None, tuple(sorted(orphans)), parent.ended_at, parent.pid)
        if first is None:
            return None
        process = first.process
        seconds = process.ended_at if first.line_order is None else first.line_ended_at
        return FirstEnd(first.number, (), seconds, process.pid)

    def alive(self) -> list[int]:
        """The processes that have not ended: of ranks, and those that started them."""
        processes = [*(rank.process for rank in self._ranks.values()), *self._parents.values()]
        return [process.pid for process in processes if process.order is None and process.pid]

    def close(self) -> None:
        """Look no more."""
        for line in self._lines.values():
            line.close()
        for descriptor, watched in self._watched.items():
            if isinstance(watched, tuple):
                watched[1].close()
            else:
                os.close(descriptor)
        for rank in self._ranks.values():
            if rank.page is not None:
                os.close(rank.page)
        self._listener.close()
        self._events.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._listener.accept()
                line.setblocking(False)
                self._lines[line.fileno()] = line
                self._events.register(line.fileno(), select.EPOLLIN)

    def _introduce(self, line: socket.socket) -> None:
        """A rank says who it is; or another process has become it, and is it from now on."""
        said = receive(line)
        if said is None:
            self._forget(line)
            return
        process = _Process(said.pid, said.process)
        parent = self._parent_of(said.pid) if said.pid else None
        before = self._ranks.get(said.rank)
        if before is not None:
            self._drop(before)
        rank = _Rank(said.rank, process, parent, said.record, RankRecord(said.rank, pid=said.pid))
        self._ranks[said.rank] = rank
        self._watch(process)
        if said.record is None:  # the process is about to become another program, which breaks the line
            self._forget(line)
        else:
            self._watched[line.fileno()] = (rank, line)
            # Else epoll may keep its place in the order, where it has just been for what it said.
            self._events.unregister(line.fileno())
            self._events.register(line.fileno(), select.EPOLLIN)

    def _drop(self, rank: _Rank) -> None:
        """Its process is another one, or has a line of its own now."""
        process = rank.process
        if process.descriptor is not None and process.order is None:
            del self._watched[process.descriptor]
            self._events.unregister(process.descriptor)
            os.close(process.descriptor)
        if process in self._unwatched:
            self._unwatched.remove(process)
        if rank.page is not None:
            os.close(rank.page)

    def _parent_of(self, pid: int) -> _Process | None:
        fields = _stat(pid)
        if not fields:
            return None
        number = int(fields[1])
        if number not in self._parents:
            self._parents[number] = _Process(number, _open_process(number))
            self._watch(self._parents[number])
        return self._parents[number]

    def _watch(self, process: _Process) -> None:
        if process.descriptor is None:
            if process.pid:
                self._unwatched.append(process)
            return
        if _is_readable(process.descriptor):  # it has ended already, perhaps after another one
            self._order_is_known = False
        self._watched[process.descriptor] = process
        self._events.register(process.descriptor, select.EPOLLIN)

    def _take_end(self, ended: Any, descriptor: int) -> None:
        if isinstance(ended, tuple):
            rank, line = ended
            self._num_ended += 1
            rank.line_order, rank.line_ended_at = self._num_ended, time.monotonic()
            self._forget(line)
        else:
            self._mark(ended)
            self._events.unregister(descriptor)
            os.close(descriptor)

    def _mark(self, process: _Process) -> None:
        self._num_ended += 1
        process.order, process.ended_at = self._num_ended, time.monotonic()

    def _forget(self, line: socket.socket) -> None:
        self._events.unregister(line.fileno())
        line.close()

    def _read(self, rank: _Rank) -> RankRecord:
        if rank.page is not None:
            rank.record = read_record(f"/proc/self/fd/{rank.page}", rank.number) or rank.record
        return rank.record

    def _view(self, rank: _Rank) -> RankView:
        now = time.monotonic()
        record, process, parent = self._read(rank), rank.process, rank.parent
        orphan = parent is not None and _outlived(rank, parent) and now - parent.ended_at > _ORPHAN_SECONDS
        return RankView(
            record,
            process.pid,
            seconds=self._still(rank, now),
            ended_seconds=None if process.order is None else now - process.ended_at,
            is_orphan=orphan and process.order is None,
        )

    def _still(self, rank: _Rank, now: float) -> float:
        """For how long it has waited without that anything moved, in seconds."""
        record = rank.record
        if not waited(record, now):
            rank.moved = (-1, 0.0, 0.0)
            return 0.0
        moved, since, at = rank.moved
        if (moved, since) != (record.moved, record.since):
            # A wait that is new to us began when it says; one in which something moved stands still from now on.
            at = now if since == record.since else record.since
            rank.moved = (record.moved, record.since, at)
        return round(now - at, 3)


def _order(rank: _Rank) -> int:
    """Of its end: when its line broke, where that was seen first."""
    return min(order for order in (rank.line_order, rank.process.order) if order is not None)


def _outlived(rank: _Rank, parent: _Process) -> bool:
    """Whether it was alive when what had started it ended."""
    return parent.order is not None and (rank.process.order is None or rank.process.order > parent.order)


def _is_readable(descriptor: int) -> bool:
    ready = select.poll()  # select() takes no descriptor above 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(0))


def _open_process(pid: int) -> int | None:
    """A descriptor of a process; None where there is none. Python has os.pidfd_open since 3.9."""
    descriptor = int(ctypes.CDLL(None).syscall(_PIDFD_OPEN, pid, 0))
    return None if descriptor < 0 else descriptor


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on: state, parent ..."""
    try:
        # "pid (name) state parent ...", where the name may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _began(pid: int) -> bytes:
    """When a process began, in ticks; empty when it has ended."""
    fields = _stat(pid)
    return b"" if not fields or fields[0] in (b"Z", b"X") else fields[19]
