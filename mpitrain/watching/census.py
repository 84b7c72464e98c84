"""The ranks of a job on this host, as its agent sees them: their records, and the order in which processes ended.

    rank     pid   parent  line    process  phase
    0        4101  4090    open    alive    begun
    1        4102  4090    2nd     3rd      begun     <- the first end of all: rank 1
    2        4103  4090    4th     5th      begun
    parent   4090                  alive

The first is to blame. mpiexec ends the others within a millisecond, and may then name any of them, as MPICH's sometimes
does. epoll reports events in the order in which they happened, however late the agent looks (Linux, epoll(7),
pidfd_open(2)). The agent watches two things of a rank. The rank's connection (roll_call.py) breaks while the kernel
closes the files of the process; mpiexec learns of the end at the same time. The process itself ends a little later; on
a loaded machine, it may end after ranks that mpiexec has ended because of it. The parent of the ranks, mpiexec or its
daemon, ends after them. If the parent ends before them, the parent is to blame, and no rank is.

The ends on several hosts are compared by time. The time of a rank's end is the kernel's (roll_call.py).

The text of this module is sent to other hosts. So it imports only modules that are sent with it, and must run with old
Pythons.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field, replace
from typing import Any

from mpitrain.error_file import WrittenError, read_error
from mpitrain.watching.proc import stat_of
from mpitrain.watching.rank_record import FAILED, PARTED, STARTED, RankRecord, read_record, write_order
from mpitrain.watching.roll_call import listen, open_process, receive, remove_left, when_closed
from mpitrain.watching.sockets import accepted
from mpitrain.watching.view import Idleness, RankView, num_reads, waited

# linux/pidfd.h: struct pidfd_info begins with the mask, and has the exit code as the last of these bytes.
_PIDFD_GET_INFO, _INFO_EXIT, _INFO_BYTES, _EXIT_CODE_AT = 0xC040FF0B, 1 << 3, 64, 60
# Of /proc/PID/stat, counted from the state: proc(5).
_EXIT_CODE_FIELD = 49


class WatchedProcess:
    """A process, and its end. epoll reports the end of a process with a descriptor; old kernels need polling."""

    def __init__(self, pid: int, descriptor: int | None) -> None:
        self.pid, self.descriptor = pid, descriptor
        self.order: int | None = None  # the place of its end among all ends seen
        self.ended_at = 0.0
        self.code: int | None = None
        self._began = _began(pid)

    def is_gone(self) -> bool:
        """Return whether the process has ended, also if its number belongs to another one now."""
        began = _began(self.pid)
        return not began or began != self._began

    def note_code(self) -> None:
        """After the end: note the exit code, or minus the signal's number; None if the kernel does not provide it.

        The record of a zombie has it. Once the parent has asked for it, the descriptor has it (since Linux 6.15).
        """
        fields = stat_of(self.pid)
        status = None
        if fields and fields[0] == b"Z":
            status = int(fields[_EXIT_CODE_FIELD])
        elif self.descriptor is not None:
            status = _status_of(self.descriptor)
        if status is not None:
            self.code = -(status & 0x7F) if status & 0x7F else status >> 8


def is_readable(descriptor: int) -> bool:
    """Return whether a descriptor can be read now; that of a process can when the process has ended."""
    ready = select.poll()  # select() takes no descriptor above 1023
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(0))


def _status_of(descriptor: int) -> int | None:
    """Return the status with which a process has ended, as wait(2) gives it."""
    info = bytearray(struct.pack("Q", _INFO_EXIT) + bytes(_INFO_BYTES - 8))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info, True)
    except OSError:  # an old kernel
        return None
    (told,) = struct.unpack_from("Q", info)
    return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0]) if told & _INFO_EXIT else None


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0


def _began(pid: int) -> bytes:
    """Return when a process began, in ticks; empty if the process has ended."""
    fields = stat_of(pid)
    return b"" if not fields or fields[0] in (b"Z", b"X") else fields[19]


# At a job's end its ranks may be orphans for a moment.
_ORPHAN_SECONDS = 1.0


@dataclass
class _Rank:
    """A rank: its process, the parent of that process, and its line."""

    number: int
    process: WatchedProcess
    parent: WatchedProcess | None
    page: int | None  # descriptor of its record; None: no record yet
    witness: int | None  # descriptor of its witness; None: it has none
    record: RankRecord  # as last read
    line_order: int | None = None  # the place of the end of its line, as in WatchedProcess
    line_ended_at: float = 0.0
    moved: tuple[int, float, float] = (-1, 0.0, 0.0)  # moves counted, start of the wait, last move
    order_number: int = 0  # of the newest order that was written into its page
    errors: int | None = None  # descriptor of its error file; None: it has sent none
    idleness: Idleness = field(default_factory=Idleness)


@dataclass(frozen=True)
class FirstEnd:
    """The first end of all.

    Attributes:
        rank: the rank that ended; None: a process that had started ranks ended.
        parent_of: the ranks that this process had started.
        seconds: the time of the end, by time.monotonic().
        pid: the process id on its host.
        kernel: what the kernel says about the end; empty: nothing, or the kernel's log was not read yet.
        code: the exit code of the rank, or minus the number of the signal; None: the kernel does not provide it.
    """

    rank: int | None
    parent_of: tuple[int, ...]
    seconds: float
    pid: int = 0
    kernel: str = ""
    code: int | None = None


class Census:
    """One table of all ranks of a job that are on this host."""

    def __init__(self, roll_call: str) -> None:
        """Make the socket at which the ranks register, and remove sockets that killed jobs have left beside it.

        Raises:
            OSError: see roll_call.listen.
        """
        self._listener = listen(roll_call)
        remove_left(roll_call)
        self._events = select.epoll()
        self._events.register(self._listener.fileno(), select.EPOLLIN)
        self._lines: dict[int, socket.socket] = {}  # by descriptor; lines of ranks that have not said their number yet
        self._ranks: dict[int, _Rank] = {}
        self._parents: dict[int, WatchedProcess] = {}
        self._watched: dict[int, Any] = {}  # by descriptor: a WatchedProcess, or a _Rank with its line
        self._unwatched: list[WatchedProcess] = []  # without a descriptor
        self.num_ended = 0  # of processes and of lines
        self._order_is_known = True

    def fileno(self) -> int:
        """A descriptor for select: readable when there are events."""
        return self._events.fileno()

    def look(self) -> None:
        """Take in the events so far."""
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
        """Return all ranks, in order, as they are now."""
        return [self._view(rank) for _, rank in sorted(self._ranks.items())]

    def first_end(self) -> FirstEnd | None:
        """What ended first; None: nothing yet, or it is not known. Some ranks do not count: those that had shut down
        with the others, those that left with code 0 before init(), and those without which the others continue."""
        ended = [rank for rank in self._ranks.values() if rank.process.order is not None]
        if ended:
            lost = {number for rank in self._ranks.values() for number in self._read(rank).lost}
            ended = [rank for rank in ended if rank.number not in lost]
        ended = [rank for rank in ended if not self._is_over(rank)] or ended
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
        return FirstEnd(first.number, (), seconds, process.pid, code=process.code)

    def _is_over(self, rank: _Rank) -> bool:
        """True if the end of a rank is not a fault: it had shut down with the others, or left without ever having
        joined them."""
        phase = self._read(rank).phase
        return phase == PARTED or (phase == STARTED and rank.process.code == 0)

    def give(self, order: dict[str, Any]) -> None:
        """Send a command (launch/orders.py) to all ranks that do not have it yet."""
        for rank in self._ranks.values():
            if rank.page is not None and rank.order_number != order["number"]:
                write_order(rank.page, order)
                rank.order_number = order["number"]

    def alive(self) -> list[int]:
        """Return the live processes: those of ranks, and those that started ranks."""
        processes = [*(rank.process for rank in self._ranks.values()), *self._parents.values()]
        return [process.pid for process in processes if process.order is None and process.pid]

    def close(self) -> None:
        """Stop watching."""
        for line in self._lines.values():
            line.close()
        for descriptor, watched in self._watched.items():
            if isinstance(watched, tuple):
                watched[1].close()
            else:
                os.close(descriptor)
        for rank in self._ranks.values():
            _close(rank.page, rank.witness, rank.errors)
        self._listener.close()
        self._events.close()

    def add(self, number: int, pid: int, errors: int) -> None:
        """Take in a rank that this process has started as a child, with the descriptor of its error file."""
        process = WatchedProcess(pid, open_process(pid))
        rank = _Rank(number, process, None, None, None, RankRecord(number, pid=pid), errors=errors)
        self._ranks[number] = rank
        self._watch(process)

    def has_ended(self, number: int) -> bool:
        """Whether the end of a rank's process was seen."""
        return self._ranks[number].process.order is not None

    def note_code(self, number: int, code: int) -> None:
        """Take in the exit code of a rank that this process has started: every kernel tells it the parent."""
        self._ranks[number].process.code = code

    def _accept(self) -> None:
        for line in accepted(self._listener):
            self._lines[line.fileno()] = line
            self._events.register(line.fileno(), select.EPOLLIN)

    def _introduce(self, line: socket.socket) -> None:
        """Record a rank's registration, or that of a process that replaces an earlier one."""
        said = receive(line)
        if said is None:
            self._forget(line)
            return
        process = WatchedProcess(said.pid, said.process)
        number = said.starter or (parent_of(said.pid) if said.pid else 0)
        parent = self._starter(number) if number else None
        before = self._ranks.get(said.rank)
        if before is not None:
            self._drop(before)
        rank = _Rank(said.rank, process, parent, said.record, said.witness, RankRecord(said.rank, pid=said.pid))
        rank.errors = said.errors
        self._ranks[said.rank] = rank
        self._watch(process)
        if said.record is None:  # the process is about to become another program, which breaks the line
            self._forget(line)
        else:
            self._watched[line.fileno()] = (rank, line)
            # Otherwise epoll may keep the line's place in the order, from the message that has just arrived on it.
            self._events.unregister(line.fileno())
            self._events.register(line.fileno(), select.EPOLLIN)

    def _drop(self, rank: _Rank) -> None:
        """Note that the rank has another process, or now has a line of its own."""
        process = rank.process
        if process.descriptor is not None and process.order is None:
            del self._watched[process.descriptor]
            self._events.unregister(process.descriptor)
            os.close(process.descriptor)
        if process in self._unwatched:
            self._unwatched.remove(process)
        _close(rank.page, rank.witness, rank.errors)
        rank.page = rank.witness = rank.errors = None  # its line may still be open, and break later

    def _starter(self, number: int) -> WatchedProcess:
        if number not in self._parents:
            self._parents[number] = WatchedProcess(number, open_process(number))
            self._watch(self._parents[number])
        return self._parents[number]

    def _watch(self, process: WatchedProcess) -> None:
        if process.descriptor is None:
            if process.pid:
                self._unwatched.append(process)
            return
        try:
            self._events.register(process.descriptor, select.EPOLLIN)
        except OSError:  # it is none of a process
            os.close(process.descriptor)
            process.descriptor = None
            return
        if is_readable(process.descriptor):  # the process has ended already, perhaps after another process
            self._order_is_known = False
        self._watched[process.descriptor] = process

    def _take_end(self, ended: Any, descriptor: int) -> None:
        if isinstance(ended, tuple):
            rank, line = ended
            self.num_ended += 1
            rank.line_order, rank.line_ended_at = self.num_ended, when_closed(rank.witness)
            self._forget(line)
        else:
            self._mark(ended)
            ended.note_code()
            self._events.unregister(descriptor)
            os.close(descriptor)

    def _mark(self, process: WatchedProcess) -> None:
        self.num_ended += 1
        process.order, process.ended_at = self.num_ended, time.monotonic()

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
        is_seen = record.phase == STARTED and process.order is None and process.pid != 0
        failure = self._failure(rank)
        if failure is not None:
            record = replace(record, phase=FAILED, error=failure.line, failed_seconds=failure.seconds)
        orphan = parent is not None and _outlived(rank, parent) and now - parent.ended_at > _ORPHAN_SECONDS
        return RankView(
            record,
            process.pid,
            seconds=self._still(rank, now),
            ended_seconds=None if process.order is None else now - process.ended_at,
            is_orphan=orphan and process.order is None,
            doing_seconds=round(now - record.since, 3) if record.since else 0.0,
            reads=num_reads(process.pid) if is_seen else 0,
            idle_seconds=round(rank.idleness.look(process.pid), 1) if is_seen else 0.0,
            code=process.code,
            traceback=failure.traceback if failure is not None else "",
        )

    @staticmethod
    def _failure(rank: _Rank) -> WrittenError | None:
        """Return how the program of the rank failed, if it has written that and has ended; else None."""
        has_failed = rank.process.order is not None and rank.process.code != 0
        return read_error(rank.errors) if has_failed and rank.errors is not None else None

    def _still(self, rank: _Rank, now: float) -> float:
        """Return how long the rank has waited without progress, in seconds."""
        record = rank.record
        if not waited(record, now):
            rank.moved = (-1, 0.0, 0.0)
            return 0.0
        moved, since, at = rank.moved
        if (moved, since) != (record.moved, record.since):
            # A new wait counts from its own start time; a wait with progress counts anew from now on.
            at = now if since == record.since else record.since
            rank.moved = (record.moved, record.since, at)
        return round(now - at, 3)


def _order(rank: _Rank) -> int:
    """Return the position of a rank's end: that of its connection's end, if that was seen first."""
    return min(order for order in (rank.line_order, rank.process.order) if order is not None)


def _outlived(rank: _Rank, parent: WatchedProcess) -> bool:
    """True if the rank was alive when its parent ended."""
    return parent.order is not None and (rank.process.order is None or rank.process.order > parent.order)


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
