"""The guard of a job on one of its hosts: reports the host's facts, then makes sure that nothing of the job is left.

The guard is sent as text over one ssh connection, which stays open while the job runs. It imports only the modules that
come with it, and must run with old Pythons. Both sides send one JSON object per line:

    launcher: {"wish": ...}                       guard: {"facts": ...}, or {"error": ...,
                                                         "condition": the name of a conditions.Condition}
                                                  guard: {"alive": 1}, every second, from a thread: it says that this
                                                         host has not fallen silent, whatever the guard waits for
    launcher: {"beat": number}, every second      guard: {"echo": number, "time": now, by its own clock}
                                                  guard: {"ranks": [view.RankView...]}, every second
                                                  guard: {"first_end": census.FirstEnd or null}
                                                  guard: {"files": [[path, inode]...], of the job,
                                                         "since": when it began, by time.time() there}
    launcher: {"begin": 1}, to an idle one
    launcher: {"facts": 1}, to ask again          guard: {"facts": ...}
    launcher: {"paths": [path...]}                guard: {"paths": {path: facts.look_at_paths(...)}}
    launcher: {"look": 1}                         guard: {"seen": [view.RankView..., with stacks]}
    launcher: {"watch": seconds}                  guard: {"ranks": ...} as often, with their states, for some seconds
                                                  guard: {"load": as load.py says}, every second meanwhile;
                                                         null, with "no_load": why it cannot be read, once
    launcher: {"look": "all"}, with the stacks of all ranks
    launcher: {"order": as orders.py says}, for the ranks
    launcher: {"bye": 1}, before it closes the connection: it lives on, and its socket stays
    launcher: {"processes": 1}                    guard: {"processes": [[pid, state, command line]...],
                                                         "unreachable": [host...]}
    launcher: {"end": linger_seconds}             guard: {"ended": [[pid, command line]...], "immortal": [...],
                                                         "lost": whether somebody removed the roll call}

A guard that is `idle` is of the next attempt (attempts.py): it costs little until mpiexec is started.

The guard ends the job's processes (processes.py) when the launcher asks for it, when the connection closes, and when
the launcher has been silent for `silence_seconds` (0: never). Then it removes the job's files (shared_files.py). If the
guard itself is killed, another one takes this over, whose wish is for a sweep: it has the `token` and the `roll_call`,
of the job the `files` that the guard knew and the start `since`, and `linger_seconds`. It sends only the last message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.context import RANK_VARIABLES
from mpitrain.launch.facts import collect, hold_ports, look_at_paths
from mpitrain.launch.hearing import Hearing, send
from mpitrain.launch.load import Load
from mpitrain.launch.memory_kills import MemoryKills, why_bus_error
from mpitrain.launch.processes import Marked, command_line, read, remove, remove_unheard
from mpitrain.launch.shared_files import SharedFiles, remove_of_ranks
from mpitrain.reading import MessageLines, whole
from mpitrain.watching.census import Census
from mpitrain.watching.rank_record import RankRecord
from mpitrain.watching.view import RankView, look_at, process_state, state_of, to_json

_BEAT_SECONDS = 1.0
_REACH_SECONDS = 1.5
# So long a guard looks more often: the launcher asks again while somebody watches the job.
_WATCH_SECONDS = 3.0


class Guard:
    """One job on this host."""

    def __init__(
        self, wish: dict[str, Any], facts: Callable[[], dict[str, Any]], census: Census, hearing: Hearing
    ) -> None:
        self._facts = facts
        self._token = wish["token"]
        self._job = Marked(self._token)
        self._roll_call = wish["roll_call"]
        self._peers = wish["peers"]
        self._is_idle = wish.get("idle", False)
        self._live = wish.get("live", "")  # the launcher's socket, on its host
        self._hearing = hearing
        self._received = MessageLines()
        self._census = census
        self._first_end: dict[str, Any] | None = None
        self._num_ended = 0
        self._shared_files = SharedFiles()
        self._num_files = -1
        self._since = time.time()
        self._files_looked = 0.0
        self._memory_kills = MemoryKills()
        self._kernel: dict[int, str] = {}  # by process: what the kernel says about its end
        self._watch_seconds, self._watched_until = _BEAT_SECONDS, 0.0
        self._load: Load | None = None  # while somebody watches
        self._has_no_load = False  # it could not be read
        self._order: dict[str, Any] | None = None

    def run(self) -> None:
        """Run until the job is over."""
        beaten = time.monotonic()
        while True:
            wait_seconds = _BEAT_SECONDS / 2
            if self._is_watched:
                wait_seconds = min(wait_seconds, max(0.0, beaten + self._watch_seconds - time.monotonic()))
            ready, _, _ = select.select([0, self._census.fileno()], [], [], wait_seconds)
            self._look_at_ends()
            now = time.monotonic()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                if self._obey(data):
                    return
            if self._hearing.is_lost(has_come=0 in ready):
                break
            if self._order is not None:
                self._census.give(self._order)
            if not self._is_idle and now - self._files_looked >= _BEAT_SECONDS / 2:  # a look reads all of /proc
                self._files_looked = now
                self._look_at_files()
            if now - beaten >= (self._watch_seconds if self._is_watched else _BEAT_SECONDS):
                beaten = now
                self._beat()
            self._look_at_load(now)
        self._end(0.0)
        if self._live:
            remove_unheard(self._live)

    def _look_at_ends(self, *, is_last: bool = False) -> None:
        self._census.look()
        for pid in self._census.alive():
            self._memory_kills.watch(pid)
        first = self._census.first_end()
        # The kernel's log may lag behind the end of a process.
        if first is not None and (is_last or first.pid not in self._kernel):
            words = why_bus_error() if first.code == -signal.SIGBUS else self._memory_kills.words(first.pid)
            self._kernel[first.pid] = words or self._kernel.get(first.pid, "")
        first_end = None if first is None else {**vars(first), "kernel": self._kernel[first.pid]}
        if first_end != self._first_end:
            self._first_end = first_end
            send({"first_end": first_end})
        if first is None and self._census.num_ended != self._num_ended:  # mpiexec may soon end others because of it
            self._beat()
        self._num_ended = self._census.num_ended

    def _look_at_files(self) -> None:
        self._shared_files.look(self._job.find, self._census.alive())
        if len(self._shared_files.of_job) != self._num_files:
            self._num_files = len(self._shared_files.of_job)
            send({"files": sorted(self._shared_files.of_job), "since": self._since})

    def _look_at_load(self, now: float) -> None:
        """Say how busy this host is, while somebody watches."""
        if not self._is_watched:
            if self._load is not None:
                self._load.end()
                self._load = None
            return
        if self._has_no_load:
            return
        self._load = self._load or Load()
        try:
            load = self._load.read(now)
        except Exception as error:  # a kernel may count in another way; the job continues
            self._has_no_load, load = True, None
            send({"load": None, "no_load": f"{type(error).__name__}: {error!s:.200}"})
        if load is not None:
            send({"load": load})

    def _obey(self, data: bytes) -> bool:
        """Do what the launcher says; return True if that was the end."""
        for message in self._received.take(data):
            if "beat" in message:
                send({"echo": message["beat"], "time": time.monotonic()})
            if "begin" in message:
                self._is_idle = False
            if "watch" in message:
                is_new = not self._is_watched
                self._watch_seconds = min(message["watch"], _BEAT_SECONDS)
                self._watched_until = time.monotonic() + _WATCH_SECONDS
                if is_new:
                    self._beat()
            if "facts" in message:
                send({"facts": self._facts()})
            if "paths" in message:
                send({"paths": look_at_paths(message["paths"])})
            if "bye" in message:
                self._live = ""
            if "end" in message:
                self._end(message["end"])
                return True
            if "processes" in message:
                processes = [[pid, process_state(pid), command_line(pid)] for pid in sorted(self._job.find())]
                send({"processes": processes, "unreachable": unreachable(self._peers)})
            if "look" in message:
                send({"seen": [to_json(view) for view in self._look_at_ranks(is_whole=message["look"] == "all")]})
            self._order = message.get("order", self._order)
        return False

    def _look_at_ranks(self, *, is_whole: bool) -> list[RankView]:
        views = {view.record.rank: view for view in self._census.views()}
        for rank, pid in self._ranks_by_variable().items():
            views.setdefault(rank, RankView(RankRecord(rank), pid))
        return look_at(views.values(), is_whole=is_whole)

    def _ranks_by_variable(self) -> dict[int, int]:
        """Find the processes that the launcher started as ranks, even if they have not called init() yet."""
        ranks: dict[int, int] = {}
        for pid in sorted(self._job.find()):
            for word in read(f"/proc/{pid}/environ").split(b"\0"):
                name, _, value = word.decode(errors="replace").partition("=")
                if name in RANK_VARIABLES:
                    rank = whole(value, 0, 1 << 31)
                    # A rank's children inherit the variable; they are younger, so most have higher process ids.
                    if rank is not None:
                        ranks.setdefault(rank, pid)
        return ranks

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() < self._watched_until

    def _beat(self) -> None:
        views = self._census.views()
        if self._is_watched:  # each state is a read of a file
            views = [replace(view, state=state_of(view)) for view in views]
        send({"ranks": [to_json(view) for view in views]})

    def _end(self, linger_seconds: float) -> None:
        """Let the job's processes end by themselves for that long, kill the rest, and remove the job's files."""
        self._shared_files.look(self._job.find)
        ended, immortal = self._job.end(linger_seconds)
        self._look_at_ends(is_last=True)
        self._beat()
        self._shared_files.remove()
        remove_of_ranks(self._token)
        is_lost = not Path(self._roll_call).exists()
        remove(self._roll_call)
        send({"ended": ended, "immortal": immortal, "lost": is_lost})


def unreachable(peers: dict[str, str]) -> list[str]:
    """Return the peers that give no answer at all on a high port; a refusal counts as an answer."""
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


def say_alive() -> None:
    """Send a sign of life every second, for ever."""
    while True:
        send({"alive": 1})
        time.sleep(_BEAT_SECONDS)


def main(wish: dict[str, Any], probe: str) -> None:
    """Run the guard; `probe` is the text of facts.py of the package.

    A wish with `linger_seconds` is for a sweep. A wish without a Python asks for no facts. `agent` is a file in a
    folder of the launcher's. The guard also removes the folder, because the launcher may be killed.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    if "linger_seconds" in wish:
        sweep(wish)
        return

    def end_job() -> None:
        Marked(wish["token"]).end(0.0)
        remove(wish["roll_call"])

    hearing = Hearing(wish["silence_seconds"], end_job)
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
    threading.Thread(target=say_alive, daemon=True).start()
    held, ports = hold_ports(wish.get("port", 0))

    def facts() -> dict[str, Any]:
        return {"ports": ports, **(collect(wish, probe) if "python" in wish else {})}

    try:
        send({"facts": facts()})
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the guard needs four per rank
        Guard(wish, facts, census, hearing).run()
    finally:
        for port in held:
            port.close()
        remove(wish["roll_call"])
        if "agent" in wish:
            remove(wish["agent"])
            folder = Path(wish["agent"]).parent
            for path in folder.glob("*"):
                if path.is_socket():  # of ssh, see ssh.py
                    remove(str(path))
            with contextlib.suppress(OSError):
                folder.rmdir()
        sys.stdout.flush()


def sweep(wish: dict[str, Any]) -> None:
    """End a job's processes and remove its files on a host whose agent was killed, in that agent's place."""
    job = Marked(wish["token"])
    shared_files = SharedFiles(wish["since"], {(path, inode) for path, inode in wish["files"]})
    shared_files.look(job.find, job.find())
    ended, immortal = job.end(wish["linger_seconds"])
    shared_files.remove()
    remove_of_ranks(wish["token"])
    remove(wish["roll_call"])
    send({"ended": ended, "immortal": immortal, "lost": False})
