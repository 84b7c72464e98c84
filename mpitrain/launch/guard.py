"""The guard of a job on one of its hosts: says what the host is like, then sees to it that nothing of the job is left.

Sent as text over one ssh connection, which stays open as long as the job runs; it imports nothing of ours but what
comes with it, and does with an old Python. Both sides send a JSON object a line:

    launcher: {"wish": ...}                       guard: {"facts": ...}, or {"error": ...,
                                                         "condition": the name of a conditions.Condition}
    launcher: {"beat": 1}, every second           guard: {"beat": 1, "ranks": [view.RankView...],
                                                         "time": now, by its own clock}
                                                  guard: {"first_end": census.FirstEnd or null}
    launcher: {"look": 1}                         guard: {"seen": [view.RankView..., with stacks]}
    launcher: {"processes": 1}                    guard: {"processes": [[pid, state, command line]...],
                                                         "unreachable": [host...]}
    launcher: {"end": linger_seconds}             guard: {"ended": [[pid, command line]...], "immortal": [...],
                                                         "lost": whether somebody has removed the roll call}

The job's processes are those with its mark in their environment, and what descends from them. The guard ends them when
it is told to, when the connection is closed, and when the launcher has been silent for `silence_seconds` (0: never).
Then it removes the job's files in /dev/shm.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mpitrain.job.context import JOB
from mpitrain.launch.facts import collect
from mpitrain.launch.shared_files import SharedFiles
from mpitrain.watching.census import Census
from mpitrain.watching.rank_record import RankRecord
from mpitrain.watching.view import RankView, look_at, process_state, to_json

# Where mpiexec says which rank a process is.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")

_BEAT_SECONDS = 1.0
_KILL_SECONDS = 5.0
_REACH_SECONDS = 1.5
# After such a gap this host, not the launcher, was silent: it was suspended or frozen.
_GAP_SECONDS = 5.0


class Guard:
    """One job on this host."""

    def __init__(self, wish: dict[str, Any], census: Census) -> None:
        self._mark = ("{}={}".format(JOB, wish["token"])).encode()
        self._roll_call = wish["roll_call"]
        self._peers = wish["peers"]
        self._silence_seconds = wish["silence_seconds"]
        self._received = b""
        self._census = census
        self._first_end: dict[str, Any] | None = None
        self._shared_files = SharedFiles()
        self._files_looked = 0.0

    def run(self) -> None:
        """Until the job is over."""
        heard = looked = beaten = time.monotonic()
        while True:
            ready, _, _ = select.select([0, self._census.fileno()], [], [], _BEAT_SECONDS / 2)
            self._look_at_ends()
            now = time.monotonic()
            if now - looked > _GAP_SECONDS:
                heard = now
            looked = now
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                heard = now
                if self._obey(data):
                    return
            if self._silence_seconds and now - heard > self._silence_seconds:
                break
            if now - self._files_looked >= _BEAT_SECONDS / 2:  # reads all of /proc
                self._files_looked = now
                self._shared_files.look(self._find)
            if now - beaten >= _BEAT_SECONDS:
                beaten = now
                self._beat()
        self._end(0.0)

    def _look_at_ends(self) -> None:
        self._census.look()
        first = self._census.first_end()
        first_end = None if first is None else vars(first)
        if first_end != self._first_end:
            self._first_end = first_end
            send({"first_end": first_end})

    def _obey(self, data: bytes) -> bool:
        """Do what the launcher says; true when that was the end."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                self._end(message["end"])
                return True
            if "processes" in message:
                processes = [[pid, process_state(pid), command_line(pid)] for pid in sorted(self._find())]
                send({"processes": processes, "unreachable": unreachable(self._peers)})
            if "look" in message:
                send({"seen": [to_json(view) for view in self._look_at_ranks()]})
        return False

    def _look_at_ranks(self) -> list[RankView]:
        views = {view.record.rank: view for view in self._census.views()}
        for rank, pid in self._ranks_by_variable().items():
            views.setdefault(rank, RankView(RankRecord(rank), pid))
        return look_at(views.values())

    def _ranks_by_variable(self) -> dict[int, int]:
        """The processes that the launcher started as ranks, also those that have not called init() yet."""
        ranks: dict[int, int] = {}
        for pid in sorted(self._find()):
            for word in read(f"/proc/{pid}/environ").split(b"\0"):
                name, _, value = word.decode(errors="replace").partition("=")
                if name in RANK_VARIABLES:
                    rank = int(value)
                    # The children of a rank have it too; they are younger, and so mostly have higher numbers.
                    ranks.setdefault(rank, pid)
        return ranks

    def _beat(self) -> None:
        send({"beat": 1, "ranks": [to_json(view) for view in self._census.views()], "time": time.monotonic()})

    def _end(self, linger_seconds: float) -> None:
        """Leave the job's processes so long to end by themselves, then kill the rest, and remove its shared memory."""
        self._shared_files.look(self._find)
        until = time.monotonic() + linger_seconds
        while (left := self._find()) and time.monotonic() < until:
            time.sleep(0.05)
        named = [[pid, command_line(pid)] for pid in sorted(left)]
        deadline = time.monotonic() + _KILL_SECONDS
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            left = self._find()
        self._look_at_ends()
        self._beat()
        self._shared_files.remove()
        is_lost = not Path(self._roll_call).exists()
        remove(self._roll_call)
        immortal = [[pid, command_line(pid)] for pid in sorted(left)]
        send({"ended": named, "immortal": immortal, "lost": is_lost})

    def _find(self) -> set[int]:
        """The processes of the job, without those that have ended and wait for their parent to notice."""
        children: dict[int, list[int]] = {}
        to_do = []
        for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
            if not entry.isdigit():
                continue
            stat, environment = read(f"/proc/{entry}/stat"), read(f"/proc/{entry}/environ")
            if not stat:
                continue
            marked = self._mark in environment.split(b"\0")
            # "pid (name) state parent ...", where the name may hold spaces and brackets.
            process_state, parent = stat.rpartition(b")")[2].split()[:2]
            if process_state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
                if marked:
                    to_do.append(int(entry))
        job: set[int] = set()
        while to_do:
            pid = to_do.pop()
            if pid not in job and pid != os.getpid():
                job.add(pid)
                to_do.extend(children.get(pid, []))
        return job


def unreachable(peers: dict[str, str]) -> list[str]:
    """The peers that leave a connection to a high port without any answer; a refusal at once is an answer."""
    waiting = {}
    for name, address in peers.items():
        way = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        way.setblocking(False)
        way.connect_ex((address, random.randint(50000, 60000)))
        waiting[way] = name
    deadline = time.monotonic() + _REACH_SECONDS
    while waiting and time.monotonic() < deadline:
        _, answered, _ = select.select([], list(waiting), [], deadline - time.monotonic())
        for way in answered:
            way.close()
            del waiting[way]
    for way in waiting:
        way.close()
    return sorted(waiting.values())


def command_line(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    return read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def read(path: str) -> bytes:
    """A file of /proc; empty when the process is gone or another user's."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def remove(path: str) -> None:
    """Remove a file, unless it is gone already."""
    with contextlib.suppress(OSError):
        Path(path).unlink()


def send(message: dict[str, Any]) -> None:
    """A line to the launcher, which may be gone."""
    data = (json.dumps(message) + "\n").encode()
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        pass


def main(wish: dict[str, Any], probe: str) -> None:
    """Run the guard; `probe` is the text of probe.py. A wish for no Python asks for no facts."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    try:
        census = Census(wish["roll_call"])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = "this is the same machine as another host of the job"
            send({"error": text, "condition": "MACHINES"})
        else:
            text = "cannot write {}: {}".format(wish["roll_call"], error.strerror)
            send({"error": text, "condition": "SOCKETS"})
        return
    try:
        send({"facts": collect(wish, probe) if "python" in wish else {}})
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each rank takes three
        Guard(wish, census).run()
    finally:
        remove(wish["roll_call"])
        sys.stdout.flush()
