"""What a rank is doing, where others can read it: whatever it waits in, and whatever MPI does.

Each rank keeps one record in memory that has a name only below its own process, /proc/PID/fd/N: nothing is left of it
when the process is gone. A wait writes into it when it has lasted 0.1 s, and when it ends, so waits that are in order
cost nothing. On a signal faulthandler writes the Python stacks of all threads into a second one; it does not need
Python's lock for that, and the main thread may be anywhere.

Who reads it: the guard of the rank's host, to which this file is sent as text (so it imports nothing of ours, and does
with an old Python); under a bare mpiexec the other ranks of the same host.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

# What a rank does. BUSY: the others wait for it, and that is as it should be. ENDED: it has come to its end.
WORKS, WAITS, BUSY, ENDED = range(4)

# Nobody else uses this one: UCX has SIGHUP and SIGALRM, batch systems SIGUSR1 and SIGUSR2, glibc the first two.
STACK_SIGNAL = signal.SIGRTMIN + 11

# edition, calls, moved, since, stall_seconds, hang_seconds, stacks, what, length of the words, words, edition
_RECORD = struct.Struct("<QqQdddiBH400sQ")
_NUMBER = struct.Struct("<Q")
_CALLS_AT, _MOVED_AT = 8, 16
_MOST_WORDS = 400
_NAME = "mpitrain-rank-"
_STACK_SECONDS = 1.0
_STACK_BYTES = 16384


class Activity:
    """This rank's record. Writing costs about a microsecond.

    Attributes:
        descriptor: of the record, for those who read it.
        stall_seconds, hang_seconds: see mpitrain.config.Config.
    """

    def __init__(self, rank: int) -> None:
        self.stall_seconds, self.hang_seconds = 30.0, 0.0  # until init() knows better: a cold start takes its time
        self._process = os.getpid()
        self.descriptor = os.memfd_create(f"{_NAME}{rank}")
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._edition = self._calls = self._moved = 0
        self._doing: list[tuple[int, str, float]] = []  # the last one counts: waits are made in waits, and in threads
        self._stacks = -1
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            self._stacks = os.memfd_create(f"{_NAME}{rank}-stacks")
            faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        self._write()

    def begin(self, what: int, words: str, since: float) -> tuple[int, str, float]:
        """It does this now, since so many seconds of time.monotonic(); the result is for `end`."""
        entry = (what, words, since)
        self._doing.append(entry)
        self._write()
        return entry

    def end(self, entry: tuple[int, str, float]) -> None:
        """It does that no more."""
        with contextlib.suppress(ValueError):
            self._doing.remove(entry)
        self._write()

    def set_limits(self, stall_seconds: float, hang_seconds: float) -> None:
        """After how long a wait is reported, and ends the job."""
        self.stall_seconds, self.hang_seconds = stall_seconds, hang_seconds
        self._write()

    def count_call(self, calls: int) -> None:
        """It has begun so many calls that all ranks make."""
        self._calls = calls
        _NUMBER.pack_into(self._memory, _CALLS_AT, calls)

    def count_moved(self) -> None:
        """Something has come or gone: this rank's wait is one in which something moves."""
        self._moved += 1
        _NUMBER.pack_into(self._memory, _MOVED_AT, self._moved)

    @property
    def moved(self) -> int:
        """How often something has come or gone."""
        return self._moved

    def _write(self) -> None:
        if os.getpid() != self._process:  # a forked child shares the memory
            return
        what, words, since = self._doing[-1] if self._doing else (WORKS, "", time.monotonic())
        text = words.encode(errors="replace")[:_MOST_WORDS]
        self._edition += 1
        _RECORD.pack_into(
            self._memory,
            0,
            self._edition,
            self._calls,
            self._moved,
            since,
            self.stall_seconds,
            self.hang_seconds,
            self._stacks,
            what,
            len(text),
            text,
            self._edition,
        )


_mine: Activity | None = None


def mine() -> Activity | None:
    """This process's; None where it is alone."""
    return _mine


def count_moved() -> None:
    """Something has come or gone, of what this process waits for."""
    if _mine is not None:
        _mine.count_moved()


def publish(rank: int) -> Activity:
    """Begin to publish what this process does; once a process."""
    global _mine  # noqa: PLW0603 - a process is one rank
    if _mine is None:
        _mine = Activity(rank)
    return _mine


# -- for those who read it ------------------------------------------------------------------------------------------


def read_record(rank: int, pid: int, descriptor: int) -> dict[str, Any] | None:
    """What a rank of this host does; None when it is gone, or another user's.

    `what`, `words`, `since` and so on as in `Activity`; `stacks` is a descriptor, or -1.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}{rank} "):  # noqa: PTH115 (Path.readlink is of Python 3.9)
            return None  # another process has been given the number
        for _ in range(5):
            with Path(path).open("rb") as file:
                fields = _RECORD.unpack(file.read(_RECORD.size))
            if fields[0] == fields[-1]:  # else it was being written
                break
    except (OSError, struct.error):
        return None
    names = ("calls", "moved", "since", "stall_seconds", "hang_seconds", "stacks", "what")
    record = {name: fields[1 + place] for place, name in enumerate(names)}
    record["words"] = fields[9][: fields[8]].decode(errors="replace")
    return record


def look_at(where: dict[int, tuple[int, int]], still: dict[int, float]) -> list[list[Any]]:
    """What ranks of this host do, a row each: rank, pid, state, what, calls, seconds, words, wchan, stack.

    `where` has their processes and descriptors, `still` for how long nothing has moved in their waits, where that is
    known better than from the record. All ranks that do not wait are asked for a stack, and the first one that does.
    """
    now = time.monotonic()
    records = {rank: read_record(rank, *at) for rank, at in where.items()}
    asked: dict[int, tuple[int, int]] = {}
    has_one_that_waits = False
    for rank, record in sorted(records.items()):
        if record is None or (record["what"] in (WAITS, ENDED) and has_one_that_waits):
            continue
        has_one_that_waits = has_one_that_waits or record["what"] == WAITS
        asked[rank] = (where[rank][0], record["stacks"])
    stacks = read_stacks(asked)
    rows = []
    for rank, (pid, _) in sorted(where.items()):
        record = records[rank] or {"what": WORKS, "calls": 0, "words": "", "since": now}
        state = process_state(pid)
        seconds = round(still.get(rank, now - record["since"] if record["what"] in (WAITS, ENDED) else 0.0), 1)
        kernel = _read(f"/proc/{pid}/wchan").decode(errors="replace") if state == "D" else ""
        does = [record["what"], record["calls"], seconds, record["words"]]
        rows.append([rank, pid, state, *does, kernel, stacks.get(rank, "")])
    return rows


def read_stacks(asked: dict[int, tuple[int, int]]) -> dict[int, str]:
    """The Python stacks of these ranks' processes, (pid, descriptor) each; those that answer, within a second."""
    begun = {}
    for rank, (pid, descriptor) in asked.items():
        # Without a handler the signal would end the process; a stopped one cannot answer.
        if descriptor < 0 or process_state(pid) in ("T", "t", "gone") or not _catches(pid, int(STACK_SIGNAL)):
            continue
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        with contextlib.suppress(OSError):
            begun[rank] = (path, path.stat().st_size)
            os.kill(pid, STACK_SIGNAL)
    texts: dict[int, str] = {}
    sizes: dict[int, int] = {}
    deadline = time.monotonic() + _STACK_SECONDS
    while len(texts) < len(begun) and time.monotonic() < deadline:
        time.sleep(0.03)
        for rank, (path, before) in begun.items():
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                if rank not in texts and size > before and sizes.get(rank) == size:  # nothing more has come
                    with path.open("rb") as file:
                        file.seek(before)
                        texts[rank] = file.read(_STACK_BYTES).decode(errors="replace")
                sizes[rank] = size
    return texts


def process_state(pid: int) -> str:
    """A process's state as ps names it: R runs, S sleeps, D waits for a disk or a network share, T is stopped."""
    stat = _read(f"/proc/{pid}/stat")
    return stat.rpartition(b")")[2].split()[0].decode() if stat else "gone"


def process_numbering() -> int:
    """Which numbers this process knows others by: in a container they mostly are not those of its machine."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # /proc is another container's
        return 0


def _catches(pid: int, number: int) -> bool:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
