"""One attempt of a job on a host, as the agent there has it (agent.py): sees its ranks, and ends its processes.

An attempt that is `idle` is the next one (attempts.py): it costs little until mpiexec is started.
"""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.context import RANK_VARIABLES
from mpitrain.launch.facts import collect, hold_ports, look_at_paths
from mpitrain.launch.hearing import send
from mpitrain.launch.host_ranks import HostRanks
from mpitrain.launch.load import Load
from mpitrain.launch.memory_kills import MemoryKills, why_bus_error
from mpitrain.launch.processes import Marked, command_line, remove
from mpitrain.launch.shared_files import SharedFiles, remove_of_ranks
from mpitrain.reading import whole
from mpitrain.watching.census import Census
from mpitrain.watching.flight_recorder import asked_calls, recorder_prefix, remove_written, written_calls
from mpitrain.watching.proc import read
from mpitrain.watching.rank_record import RankRecord
from mpitrain.watching.view import RankView, look_at, process_state, state_of, to_json

BEAT_SECONDS = 1.0
_REACH_SECONDS = 1.5
_TOLD_SECONDS = 1.0
# So long an attempt is looked at more often: the launcher asks again while somebody watches the job.
_WATCH_SECONDS = 3.0
_NONE = resource.RLIM_INFINITY, resource.RLIM_INFINITY


class HostAttempt:
    """One attempt on this host. Call `look` when one of `files` is readable, and `go_on` some times a second."""

    def __init__(self, wish: dict[str, Any], census: Census, probe: str = "", limit: tuple[int, int] = _NONE) -> None:
        """`wish` is the launcher's, and `probe` the text of facts.py of the package. Without a Python in the wish, it
        asks for no facts. `limit` is that of the files that a rank may open.
        """
        self._wish, self._probe = wish, probe
        self._token = wish["token"]
        self._job = Marked(self._token)
        self._is_idle = wish.get("idle", False)
        self._census = census
        self._ranks = HostRanks(census, self._send, limit)
        self._first_end: dict[str, Any] | None = None
        self._num_ended = 0
        self._shared_files = SharedFiles()
        self._num_files = -1
        self._since = time.time()
        self._files_looked, self._beaten = 0.0, time.monotonic()
        self._memory_kills = MemoryKills()
        self._kernel: dict[int, str] = {}  # by process: what the kernel says about its end
        self._watch_seconds, self._watched_until = BEAT_SECONDS, 0.0
        self._load: Load | None = None  # while somebody watches
        self._has_no_load = False  # it could not be read
        self._order: dict[str, Any] | None = None
        self._has_ended = False
        self._recorder = recorder_prefix(wish["roll_call"])
        self._held, self._ports = hold_ports(wish.get("port", 0))
        for_workers, self._worker_ports = hold_ports(0, wish.get("num_worker_ports", 0))
        self._held += for_workers
        self._answer_facts()

    def files(self) -> list[int]:
        """Descriptors for select: readable when there is something to do."""
        return [self._census.fileno(), *self._ranks.files()]

    def patience(self, now: float) -> float:
        """For how long nothing is to be done, unless something comes."""
        return max(0.0, self._beaten + self._watch_seconds - now) if self._is_watched else BEAT_SECONDS / 2

    def go_on(self, now: float) -> None:
        """Do what is due."""
        if self._order is not None:
            self._census.give(self._order)
        if not self._is_idle and now - self._files_looked >= BEAT_SECONDS / 2:  # a look reads all of /proc
            self._files_looked = now
            self._look_at_files()
        if now - self._beaten >= (self._watch_seconds if self._is_watched else BEAT_SECONDS):
            self._beaten = now
            self._beat()
        self._look_at_load(now)

    def close(self) -> None:
        """End what is left, unless that has been done, and remove what the attempt had here."""
        if not self._has_ended:
            self.end(0.0)
        for port in self._held:
            port.close()
        self._census.close()
        if "ssh" in self._wish:  # a program in a folder of the launcher's, which may have been killed
            remove(self._wish["ssh"])
            folder = Path(self._wish["ssh"]).parent
            for path in folder.glob("*"):
                if path.is_socket():  # of ssh, see ssh.py
                    remove(str(path))
            with contextlib.suppress(OSError):
                folder.rmdir()

    def end_at_once(self) -> None:
        """End its processes. Any thread may call."""
        self._job.end(0.0)
        remove(self._wish["roll_call"])
        remove_written(self._recorder)

    def look(self, *, is_last: bool = False) -> None:
        """Take in which ranks have appeared or ended."""
        self._census.look()
        self._ranks.look()
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
            self._send({"first_end": first_end})
        if first is None and self._census.num_ended != self._num_ended:  # mpiexec may soon end others because of it
            self._beat()
        self._num_ended = self._census.num_ended

    def _look_at_files(self) -> None:
        self._shared_files.look(self._job.find, self._census.alive())
        if len(self._shared_files.of_job) != self._num_files:
            self._num_files = len(self._shared_files.of_job)
            self._send({"files": sorted(self._shared_files.of_job), "since": self._since})

    def _look_at_load(self, now: float) -> None:
        """Report how busy this host is, while the job is watched."""
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
            self._send({"load": None, "no_load": f"{type(error).__name__}: {error!s:.200}"})
        if load is not None:
            self._send({"load": load})

    def obey(self, message: dict[str, Any]) -> bool:
        """Carry out a message of the launcher; return True if that was the end."""
        if "begin" in message:
            self._is_idle = False
        self._ranks.take(message)
        if "watch" in message:
            is_new = not self._is_watched
            self._watch_seconds = min(message["watch"], BEAT_SECONDS)
            self._watched_until = time.monotonic() + _WATCH_SECONDS
            if is_new:
                self._beat()
        if "facts" in message:
            self._answer_facts()
        if "paths" in message:
            self._answer(lambda: {"paths": look_at_paths(message["paths"])})
        if "processes" in message:
            processes = [[pid, process_state(pid), command_line(pid)] for pid in sorted(self._job.find())]
            self._send({"processes": processes, "unreachable": unreachable(self._wish["peers"])})
        if "look" in message:
            seen = self._look_at_ranks(is_whole=message["look"] == "all")
            self._send({"seen": [to_json(view) for view in seen]})
        self._order = message.get("order", self._order)
        if "end" in message:
            self.end(message["end"])
        return "end" in message or "bye" in message

    def _answer_facts(self) -> None:
        ports = {"ports": self._ports, "worker_ports": self._worker_ports}
        if "python" in self._wish:
            self._answer(lambda: {"facts": {**ports, **collect(self._wish, self._probe)}})
        else:
            self._send({"facts": ports})

    def _answer(self, work: Callable[[], dict[str, Any]]) -> None:
        """Answer when that is done, which may take seconds. Another attempt may train meanwhile."""

        def answer() -> None:
            try:
                self._send(work())
            except Exception as error:  # nobody looks at a thread's error
                self._send({"error": f"its facts cannot be read: {error!r}", "condition": "PYTHON"})

        threading.Thread(target=answer, name="facts", daemon=True).start()

    def _send(self, message: dict[str, Any]) -> None:
        send({"attempt": self._token, **message})

    def _look_at_ranks(self, *, is_whole: bool) -> list[RankView]:
        views = {view.record.rank: view for view in self._census.views()}
        for rank, pid in self._ranks_by_variable().items():
            views.setdefault(rank, RankView(RankRecord(rank), pid))
        seen = look_at(views.values(), is_whole=is_whole)
        recorded = asked_calls(self._recorder, views)
        return [replace(view, recorded=recorded.get(view.record.rank, ())) for view in seen]

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
        self._send({"ranks": [to_json(view) for view in views]})

    def end(self, linger_seconds: float) -> None:
        """Let the job's processes end by themselves for that long, kill the rest, and remove the job's files."""
        self._has_ended = True
        self._shared_files.look(self._job.find)
        ended, immortal = self._job.end(linger_seconds)
        # A process has lost its variables, by which it is found, a moment before the kernel tells its end.
        deadline = time.monotonic() + _TOLD_SECONDS
        while not immortal and self._census.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
            self._census.look()
        self.look(is_last=True)
        self._ranks.close()
        self._beat()
        # NCCL has written them at the end of its own timeout.
        recorded = written_calls(self._recorder, [view.record.rank for view in self._census.views()])
        self._shared_files.remove()
        remove_of_ranks(self._token)
        is_lost = not Path(self._wish["roll_call"]).exists()
        remove(self._wish["roll_call"])
        remove_written(self._recorder)
        self._send({"ended": ended, "immortal": immortal, "lost": is_lost, "recorded": list(recorded.items())})


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


def begun(wish: dict[str, Any], probe: str, limit: tuple[int, int]) -> HostAttempt | None:
    """Begin an attempt, see HostAttempt. None: that cannot be, and the launcher has heard why."""
    try:
        census = Census(wish["roll_call"])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = {"error": "this is the same machine as another host of the job", "condition": "MACHINES"}
        else:
            text = "cannot write {}: {}".format(wish["roll_call"], error.strerror)
            why = {"error": text, "condition": "SOCKETS"}
        send({"attempt": wish["token"], **why})
        return None
    return HostAttempt(wish, census, probe, limit)


def sweep(wish: dict[str, Any]) -> None:
    """End the processes and remove the files of an attempt on a host whose agent was killed, in place of that agent."""
    job = Marked(wish["token"])
    shared_files = SharedFiles(wish["since"] or time.time(), {(path, inode) for path, inode in wish["files"]})
    shared_files.look(job.find, job.find())
    ended, immortal = job.end(wish["linger_seconds"])
    shared_files.remove()
    remove_of_ranks(wish["token"])
    remove(wish["roll_call"])
    remove_written(recorder_prefix(wish["roll_call"]))
    send({"attempt": wish["token"], "ended": ended, "immortal": immortal, "lost": False})
