"""Chaos on one host: watches the job's ranks there, makes those faults that a process can make, and undoes them.

Sent to a host as text, like the agent: this module imports only those that come with it (`saboteur` in crew.py), and
must run with old Pythons. It touches only processes that carry the launcher in their environment. One JSON object per
line:

    chaos: {"launcher": ..., "folder": ...}, the wish   saboteur: {"greeting": {"hears", "disk"}}, see `_greet`
    chaos: {"look": 1}: look closely for a while        saboteur: {"ranks": [view of a rank...], "launcher": alive?}
                                                        saboteur: {"said": [line of the launcher...]}
    chaos: {"fault": number, "kind", "token", "rank",   saboteur: {"done": number, "deed", "step", "ago_seconds"}, then
            "seconds"}                                            {"undone": number}; or {"refused": number, "why"}
    chaos: {"undo": 1}                                  saboteur: {"undone": number} if there was anything to undo
    chaos: {"end": 1}                                   saboteur: {"left": [text...]}: what is left of the job here
    chaos: {"beat": 1}, every second

If the connection closes, or chaos is silent for too long, the saboteur undoes what it has made, and ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.context import LAUNCHER, JobContext
from mpitrain.launch.hearing import Hearing, send
from mpitrain.launch.processes import command_line, launcher_pid, remove
from mpitrain.launch.roster import jobs
from mpitrain.launch.shared_files import SharedFiles, files, folders_of_ranks
from mpitrain.reading import MessageLines
from mpitrain.watching.proc import opened, read
from mpitrain.watching.rank_record import NAME, RankRecord, read_record
from mpitrain.watching.view import process_state

# A scan reads all of /proc, 30 ms for 300 processes; a glance reads only what is new there, 1 ms.
_SCAN_SECONDS, _FAST_SCAN_SECONDS, _GLANCE_SECONDS = 2.0, 0.5, 0.1
_YOUNG_SECONDS = 2.0  # a process may get the job's mark so long after its start
_REPORT_SECONDS = 5.0  # so often at least, because chaos takes silence for a broken connection
_LOOK_SECONDS, _FAST_LOOK_SECONDS = 0.25, 0.02
_CLOSELY_SECONDS = 3.0
_DIE_SECONDS = 1.0
_SILENCE_SECONDS = 60.0
_LEAVE_SECONDS = 10.0  # an agent takes so long to clear up
_KEPT_ATTEMPTS = 3  # the one that trains, one before it, and one that only waits to take over


class Saboteur:
    """Chaos on this host."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self._launcher, self._folder = wish["launcher"], wish["folder"]
        self._received = MessageLines()
        self._tokens: list[str] = []  # of the job's starts, in order
        self._pids: list[int] = []
        self._ranks: dict[tuple[str, int], tuple[int, int]] = {}  # by token and rank: process, descriptor of the record
        self._without_record: dict[int, int] = {}  # the processes of ranks that have none yet
        self._seen: dict[str, float] = {}  # every process here, and when it was seen first
        self._contexts: dict[str, JobContext] = {}  # by token
        self._said = -1  # descriptor of the launcher's output
        self._line = ""  # the last one of it, which has no end yet
        self._outage: Outage | None = None
        self._files = SharedFiles()
        self._scanned = self._glanced = self._reported = self._closely_until = 0.0
        self._sent: Any = None

    def run(self) -> None:
        """Run until the connection closes."""
        hearing = Hearing(_SILENCE_SECONDS)
        self._greet()
        while True:
            now = time.monotonic()
            is_close = now < self._closely_until
            if now - self._scanned >= _SCAN_SECONDS or (is_close and self._glance(now)):
                self._scanned = now
                self._scan()
            self._report()
            ready, _, _ = select.select([0], [], [], _FAST_LOOK_SECONDS if is_close else _LOOK_SECONDS)
            if hearing.is_lost(has_come=bool(ready)):
                break
            if ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                for order in self._received.take(data):
                    self._obey(order)
            if self._outage is not None and self._outage.is_over():
                send({"undone": self._outage.number})
                self._outage = None
        self._undo()

    def _greet(self) -> None:
        """Say whether the launcher's output can be read, and why the folder must not be filled ("": it may be)."""
        pid = launcher_pid(self._launcher)
        with contextlib.suppress(OSError):
            if pid is not None and stat.S_ISREG(Path(f"/proc/{pid}/fd/2").stat().st_mode):
                self._said = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY)
                os.lseek(self._said, 0, os.SEEK_END)
        send({"greeting": {"hears": self._said >= 0, "disk": refusal_to_fill(self._folder) if self._folder else ""}})

    def _glance(self, now: float) -> bool:
        """Return whether a scan would find a new process of the job, or may find a record."""
        if now - self._glanced < _GLANCE_SECONDS:
            return False
        self._glanced = now
        self._seen = {entry: self._seen.get(entry, now) for entry in os.listdir("/proc") if entry.isdigit()}  # noqa: PTH208
        young = [int(entry) for entry, first in self._seen.items() if now - first < _YOUNG_SECONDS]
        if any(pid not in self._pids and self._is_of_job(pid) for pid in young):
            return True
        self._open_records()
        return bool(self._without_record) and now - self._scanned > _FAST_SCAN_SECONDS

    def _scan(self) -> None:
        """Find the processes of the job, and the records of its ranks."""
        of_job = [job for job in jobs() if job["launcher"] == self._launcher]
        self._pids = [pid for job in of_job for pid in job["pids"]]
        for job in of_job:
            token = job["id"]
            if token not in self._tokens:
                self._tokens.append(token)
                for old in [key for key in self._ranks if key[0] not in self._tokens[-_KEPT_ATTEMPTS:]]:
                    os.close(self._ranks.pop(old)[1])
            if token == self._tokens[-1]:
                pids = {view["record"]["rank"]: view["pid"] for view in job["ranks"]}
                known = {rank: pid for (of_token, rank), (pid, _) in self._ranks.items() if of_token == token}
                self._without_record = {rank: pid for rank, pid in pids.items() if known.get(rank) != pid}
        self._open_records()
        self._files.look(lambda: self._pids)

    def _open_records(self) -> None:
        for rank, pid in list(self._without_record.items()):
            descriptor = _record_of(pid, rank)
            if descriptor < 0:
                continue
            token = self._tokens[-1]
            if (token, rank) in self._ranks:
                os.close(self._ranks[token, rank][1])
            self._ranks[token, rank] = pid, descriptor
            del self._without_record[rank]
            words = read(f"/proc/{pid}/environ").decode(errors="replace").split("\0")
            self._contexts[token] = JobContext.read(dict(word.partition("=")[::2] for word in words))

    def _records(self) -> dict[tuple[str, int], RankRecord]:
        """Return the last record of each rank, by token and rank, also of those that have ended."""
        records = {}
        for key, (_, descriptor) in self._ranks.items():
            record = read_record(f"/proc/self/fd/{descriptor}", key[1])
            if record is not None:
                records[key] = record
        return records

    def _report(self) -> None:
        ranks = [
            {
                "token": token,
                "rank": rank,
                "phase": record.phase,
                "first_step": record.first_step,
                "step": record.step,
                "samples_per_second": record.metrics.get("samples/s", 0.0),
                "lost": list(record.lost),
                "error": record.error,
                "is_alive": process_state(self._ranks[token, rank][0]) not in ("Z", "X", "gone"),
                "size": self._contexts[token].expected_size,
                "recovers": self._contexts[token].recover,
            }
            for (token, rank), record in sorted(self._records().items())
        ]
        message = {"ranks": ranks, "launcher": launcher_pid(self._launcher) is not None}
        now = time.monotonic()
        if message != self._sent or now - self._reported > _REPORT_SECONDS:
            self._sent, self._reported = message, now
            send(message)
        if self._said >= 0:
            text = os.read(self._said, 1 << 16).decode(errors="replace")
            *lines, self._line = (self._line + text).split("\n")
            if marked := [line for line in lines if "mpitrain: " in line]:
                send({"said": marked})

    def _obey(self, order: dict[str, Any]) -> None:
        if "look" in order:
            self._closely_until = time.monotonic() + _CLOSELY_SECONDS
        if "fault" in order:
            why = self._make(order)
            if why:
                send({"refused": order["fault"], "why": why})
        if "undo" in order:
            self._undo()
        if "end" in order:
            self._report()
            send({"left": self._left()})

    def _make(self, order: dict[str, Any]) -> str:
        """Make a fault; return why not, if it cannot be made."""
        number, kind, rank, seconds = order["fault"], order["kind"], order["rank"], order["seconds"]
        if self._outage is not None:
            return "the previous fault has not been undone"
        self._scan()
        if kind == "disk":
            if why := refusal_to_fill(self._folder):
                return why
            filler = str(Path(self._folder, FILLER))
            self._outage = Outage(number, lambda: fill(filler), lambda: remove(filler), seconds)
            deed = f"{self._folder} filled for {seconds:g} s"
            send({"done": number, "deed": deed, "step": 0, "ago_seconds": 0.0})
            return ""
        hit = [key for key in self._ranks if key[0] == order["token"] and rank in (None, key[1])]
        pids = self._pids if rank is None else [self._ranks[key][0] for key in hit]
        pids = [pid for pid in pids if self._is_of_job(pid)]
        if not pids:
            return "the process had ended already"
        made = time.monotonic()
        if kind == "rank":
            deed = f"process {pids[0]} killed"
            os.kill(pids[0], signal.SIGKILL)
            deadline = time.monotonic() + _DIE_SECONDS
            while process_state(pids[0]) not in ("Z", "X", "gone") and time.monotonic() < deadline:
                time.sleep(0.001)
        else:
            deed = f"{len(pids)} process{'es' * (len(pids) > 1)} stopped for {seconds:g} s"
            self._outage = Outage(
                number, lambda: self._signal(pids, "STOP"), lambda: self._signal(pids, "CONT"), seconds
            )
            time.sleep(_FAST_LOOK_SECONDS)
        records = self._records()
        step = min((records[key].step for key in hit if key in records), default=0)
        send({"done": number, "deed": deed, "step": step, "ago_seconds": time.monotonic() - made})
        return ""

    def _signal(self, pids: list[int], name: str) -> None:
        """Send a signal to those that are still processes of the job."""
        for pid in pids:
            with contextlib.suppress(OSError):
                if self._is_of_job(pid):
                    os.kill(pid, getattr(signal, f"SIG{name}"))

    def _is_of_job(self, pid: int) -> bool:
        return f"{LAUNCHER}={self._launcher}".encode() in read(f"/proc/{pid}/environ").split(b"\0")

    def _undo(self) -> None:
        if self._outage is not None:
            self._outage.end()
            send({"undone": self._outage.number})
            self._outage = None

    def _left(self) -> list[str]:
        """Return what is left of the job here, after the time that an agent takes to clear up."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while True:
            self._scan()
            left = [f"process {pid} {command_line(pid)}" for pid in self._pids]
            left += sorted(path for path, inode in self._files.of_job.intersection(files()))
            for token in self._tokens:
                left += sorted(map(str, [*Path("/tmp").glob(f"mpitrain-*{token}*"), *folders_of_ranks(token)]))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


def _record_of(pid: int, rank: int) -> int:
    """Return a descriptor of the record of a rank, which outlives the rank; -1: it has none yet."""
    for path, what in opened(pid):
        if what.startswith(f"/memfd:{NAME}{rank} "):
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDONLY)
    return -1


# Only a small file system of its own is filled, which nobody else needs.
FILLER = ".mpitrain-chaos-fills-this-disk"
MOST_DISK_BYTES = 256 << 20  # a tmpfs is memory
_SHARED_PLACES = ("/", "/tmp", "/run", "/dev/shm", "/var", "/home")


def refusal_to_fill(folder: str) -> str:
    """Say why the disk with this folder must not be filled; "" if it may be: a small file system of its own."""
    try:
        device = Path(folder).stat().st_dev
        status = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    shared = [place for place in _SHARED_PLACES if Path(place).exists() and Path(place).stat().st_dev == device]
    if shared:
        return f"{folder} is on the file system of {shared[0]}, which others need"
    size_bytes = status.f_blocks * status.f_frsize
    if size_bytes > MOST_DISK_BYTES:
        return (
            f"{folder} is on a file system of {size_bytes >> 20} MiB; chaos fills at most {MOST_DISK_BYTES >> 20} MiB"
        )
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


def fill(path: str) -> None:
    """Make a file in this folder that takes all free room."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        for size_bytes in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size_bytes))


class Outage:
    """A fault in force, which is undone after some seconds, whatever becomes of the process that ordered it.

        process ──fork──> keeper of the outage: makes the fault, waits, undoes it
           └──── pipe ──────┘ the kernel closes it when the process ends: the keeper then undoes the fault at once

    So the fault ends even if chaos, an ssh connection or the process here is killed. If the keeper is killed, the
    process undoes the fault. Make at most one in a process: a second keeper would hold the pipe of the first one open.
    """

    def __init__(self, number: int, make: Callable[[], None], undo: Callable[[], None], seconds: float) -> None:
        """Make the fault in a process of its own; `undo` may be called there and here, and more than once."""
        self.number, self._undo = number, undo
        reader, self._writer = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            os.close(self._writer)
            _keep(reader, make, undo, seconds)
        os.close(reader)

    def is_over(self) -> bool:
        """Return whether the fault has been undone."""
        pid, status = os.waitpid(self._keeper, os.WNOHANG)
        if pid:
            self._see_to(status)
        return pid != 0

    def end(self) -> None:
        """Undo the fault now."""
        os.write(self._writer, b"\n")
        self._see_to(os.waitpid(self._keeper, 0)[1])

    def _see_to(self, status: int) -> None:
        os.close(self._writer)
        if os.WIFSIGNALED(status):
            self._undo()


def _keep(reader: int, make: Callable[[], None], undo: Callable[[], None], seconds: float) -> None:
    """Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # else an ssh connection would wait for the keeper
            os.dup2(nowhere, descriptor)
        make()
        select.select([reader], [], [], seconds)
    finally:
        try:
            undo()
        finally:
            os._exit(0)


def main(wish: dict[str, Any], _probe: str) -> None:
    """Serve chaos; the wish names the launcher of the job."""
    os.set_blocking(1, True)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Saboteur(wish).run()
