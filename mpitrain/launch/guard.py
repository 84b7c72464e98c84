"""The guard of a job on one of its hosts: says what the host is like, then sees to it that nothing of the job is left.

Sent as text over one ssh connection, which stays open as long as the job runs; it imports nothing of ours but what
comes with it, and does with an old Python. Both sides send a JSON object a line:

    launcher: {"wish": ...}                       guard: {"facts": ...}, or {"error": ...}
    launcher: {"beat": 1}, every second           guard: {"beat": 1, "signed": [line...], "gone": [rank...],
                                                         "waits": [[rank, what, seconds, stall, hang]...],
                                                         "orphans": [rank...], "vanished": [rank...],
                                                         "steps": text,
                                                         "time": now, by its own clock}
                                                  guard: {"died": the first rank or null, "time": its end}
    launcher: {"ranks": 1}                        guard: {"ranks": [row of activity.look_at...]}
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
import json
import os
import random
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mpitrain.launch.activity import ENDED, WAITS, look_at, process_numbering, process_state, read_record
from mpitrain.launch.deaths import Deaths, Orphans
from mpitrain.launch.facts import collect
from mpitrain.launch.shared_files import SharedFiles

# Variables in the environment of every process of the job: its id, and who has launched it (roster.launcher_name).
MARK, LAUNCHER = "_MPITRAIN_JOB", "_MPITRAIN_LAUNCHER"
# Where mpiexec says which rank a process is.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")

_BEAT_SECONDS = 1.0
_KILL_SECONDS = 5.0
_REACH_SECONDS = 1.5
# mpiexec ends a job within milliseconds when a rank's process has; now and then MPICH's does not, and waits for ever.
_VANISHED_SECONDS = 10.0
# After such a gap this host, not the launcher, was silent: it was suspended or frozen.
_GAP_SECONDS = 5.0


class Guard:
    """One job on this host."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self._mark = ("{}={}".format(MARK, wish["token"])).encode()
        self._roll_call = wish["roll_call"]
        self._steps = steps_path(wish["roll_call"])
        self._peers = wish["peers"]
        self._silence_seconds = wish["silence_seconds"]
        self._read_bytes = 0
        self._pids: dict[int, int] = {}  # of the ranks, until they are gone
        self._received = b""
        self._deaths = Deaths()
        self._orphans = Orphans()
        self._vanished: dict[int, float] = {}  # ranks that have ended without a word: since when
        self._first_dead: int | None = None
        self._shared_files = SharedFiles()
        self._where: dict[int, tuple[int, int]] = {}  # of the ranks that have called init(): process and descriptor
        self._over: set[int] = set()  # ranks whose program has come to its end
        self._moved: dict[int, tuple[int, float, float]] = {}  # by rank: what has moved in which wait, and when last

    def run(self) -> None:
        """Until the job is over."""
        heard = looked = beaten = time.monotonic()
        while True:
            ready, _, _ = select.select([0, self._deaths.fileno()], [], [], _BEAT_SECONDS / 2)
            self._look_for_deaths()
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
            self._shared_files.look(self._find)
            if now - beaten >= _BEAT_SECONDS:
                beaten = now
                self._beat()
        self._end(0.0)

    def _look_for_deaths(self) -> None:
        for line in self._read_steps().splitlines():
            rank, pid = map(int, line.split()[:2])
            self._deaths.watch(rank, pid)
        first = self._deaths.first()
        if first != self._first_dead:
            self._first_dead = first
            send({"died": first, "time": time.monotonic()})

    def _read_steps(self) -> str:
        return read(self._steps).replace(b"\0", b"").decode()

    def _obey(self, data: bytes) -> bool:
        """Do what the launcher says; true when that was the end."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                self._end(message["end"])
                return True
            if "processes" in message:
                found = [[pid, process_state(pid), command_line(pid)] for pid in sorted(self._find())]
                send({"processes": found, "unreachable": unreachable(self._peers)})
            if "ranks" in message:
                send({"ranks": self._look_at_ranks()})
        return False

    def _look_at_ranks(self) -> list[list[Any]]:
        where = dict(self._where)
        for rank, pid in self._ranks_by_variable().items():
            where.setdefault(rank, (pid, -1))
        return look_at(where, {rank: seconds for rank, _, seconds, _, _ in self._waits()})

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

    def _waits(self) -> list[list[Any]]:
        """The ranks that wait for others: rank, what, for how long without that anything moved, and its limits."""
        now = time.monotonic()
        waits = []
        for rank, at in self._where.items():
            record = read_record(rank, *at)
            if record is None or record["what"] not in (WAITS, ENDED):
                self._moved.pop(rank, None)
                continue
            moved, since, at_seconds = self._moved.get(rank, (-1, 0.0, 0.0))
            if (moved, since) != (record["moved"], record["since"]):
                # A wait that is new to us began when it says; one in which something moved stands still from now on.
                at_seconds = now if since == record["since"] else record["since"]
                self._moved[rank] = (record["moved"], record["since"], at_seconds)
            still = round(now - at_seconds, 3)
            waits.append([rank, record["what"], still, record["stall_seconds"], record["hang_seconds"]])
        return waits

    def _beat(self) -> None:
        signed = self._signed()
        for line in signed:
            word, number, *rest = line.split()
            if word == "started":
                self._pids[int(number)] = int(rest[0])
            elif word == "called" and len(rest) == 4:
                pid, descriptor, parent, numbering = map(int, rest)
                if numbering != process_numbering():  # in a container: here that is another process, or none
                    continue
                self._vanished.pop(int(number), None)
                self._where[int(number)] = (pid, descriptor)
                self._orphans.watch(int(number), pid, parent)
                self._deaths.watch(int(number), pid)
            elif word == "done":
                self._over.add(int(number))
        gone = [rank for rank, pid in self._pids.items() if not Path(f"/proc/{pid}").exists()]
        self._pids = {rank: pid for rank, pid in self._pids.items() if rank not in gone}
        lost = {"orphans": self._orphans.look(), "vanished": self._find_vanished()}
        about = {"steps": self._read_steps(), "time": time.monotonic()}
        send({"beat": 1, "signed": signed, "gone": gone, "waits": self._waits(), **lost, **about})

    def _find_vanished(self) -> list[int]:
        now = time.monotonic()
        for rank, (pid, _) in self._where.items():
            if rank not in self._over and process_state(pid) in ("gone", "Z", "X"):
                self._vanished.setdefault(rank, now)
        return sorted(
            rank for rank, since in self._vanished.items() if rank not in self._over and now - since > _VANISHED_SECONDS
        )

    def _signed(self) -> list[str]:
        """The whole lines that have come to the roll call."""
        try:
            with Path(self._roll_call).open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except OSError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(text)
        return text.decode(errors="replace").splitlines()

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
        self._beat()
        self._shared_files.remove()
        is_lost = not Path(self._roll_call).exists()
        remove(self._roll_call, self._steps)
        immortal = [[pid, command_line(pid)] for pid in sorted(left)]
        send({"ended": named, "immortal": immortal, "lost": is_lost})

    def _find(self) -> set[int]:
        """The processes of the job, without those that have ended and wait for their parent to notice."""
        children: dict[int, list[int]] = {}
        found = []
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
                    found.append(int(entry))
        job: set[int] = set()
        while found:
            pid = found.pop()
            if pid not in job and pid != os.getpid():
                job.add(pid)
                found.extend(children.get(pid, []))
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


def steps_path(roll_call: str) -> str:
    """Where the ranks say which step they are in; mpitrain.launch.steps has more."""
    return f"{roll_call}.steps"


def remove(*paths: str) -> None:
    """Remove files, unless they are gone already."""
    for path in paths:
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
        for path in (wish["roll_call"], steps_path(wish["roll_call"])):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        send({"error": "this is the same machine as another host of the job"})
        return
    except OSError as error:
        send({"error": "cannot write {}: {}".format(wish["roll_call"], error.strerror)})
        return
    try:
        send({"facts": collect(wish, probe) if "python" in wish else {}})
        Guard(wish).run()
    finally:
        remove(wish["roll_call"], steps_path(wish["roll_call"]))
        sys.stdout.flush()
