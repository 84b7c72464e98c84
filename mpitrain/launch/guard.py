"""The guard of a job on one of its hosts: says what the host is like, then sees to it that nothing of the job is left.

Sent as text over one ssh connection, which stays open as long as the job runs; it imports nothing of ours but facts.py,
which comes with it, and does with an old Python. Both sides send a JSON object a line:

    launcher: {"wish": ...}                       guard: {"facts": ...}
    launcher: {"beat": 1}, every second           guard: {"beat": 1, "signed": [line...], "gone": [rank...]}
    launcher: {"processes": 1}                    guard: {"processes": [[pid, state, command line]...],
                                                         "unreachable": [host...]}
    launcher: {"end": linger_seconds}             guard: {"ended": [[pid, command line]...], "immortal": [...]}

The job's processes are those with its mark in their environment, and what descends from them. The guard ends them when
it is told to, when the connection is closed, and when the launcher has been silent for `silence_seconds`.
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

from mpitrain.launch.facts import collect

MARK = "_MPITRAIN_JOB"  # a variable in the environment of every process of the job

_BEAT_SECONDS = 1.0
_KILL_SECONDS = 5.0
_REACH_SECONDS = 1.5
# After such a gap this host, not the launcher, was silent: it was suspended or frozen.
_GAP_SECONDS = 5.0


class Guard:
    """One job on this host."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self._mark = ("{}={}".format(MARK, wish["token"])).encode()
        self._roll_call = wish["roll_call"]
        self._peers = wish["peers"]
        self._silence_seconds = wish["silence_seconds"]
        self._read_bytes = 0
        self._pids: dict[int, int] = {}  # of the ranks, until they are gone
        self._received = b""

    def run(self) -> None:
        """Until the job is over."""
        heard = looked = beaten = time.monotonic()
        while True:
            ready, _, _ = select.select([0], [], [], _BEAT_SECONDS / 2)
            now = time.monotonic()
            if now - looked > _GAP_SECONDS:
                heard = now
            looked = now
            if ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                heard = now
                if self._obey(data):
                    return
            if now - heard > self._silence_seconds:
                break
            if now - beaten >= _BEAT_SECONDS:
                beaten = now
                self._beat()
        self._end(0.0)

    def _obey(self, data: bytes) -> bool:
        """Do what the launcher says; true when that was the end."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                self._end(message["end"])
                return True
            if "processes" in message:
                found = [[pid, state(pid), command_line(pid)] for pid in sorted(self._find())]
                send({"processes": found, "unreachable": unreachable(self._peers)})
        return False

    def _beat(self) -> None:
        signed = self._signed()
        for line in signed:
            word, number, *rest = line.split()
            if word == "started":
                self._pids[int(number)] = int(rest[0])
        gone = [rank for rank, pid in self._pids.items() if not Path(f"/proc/{pid}").exists()]
        self._pids = {rank: pid for rank, pid in self._pids.items() if rank not in gone}
        send({"beat": 1, "signed": signed, "gone": gone})

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
        """Leave the job's processes so long to end by themselves, then kill the rest."""
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
        with contextlib.suppress(OSError):
            Path(self._roll_call).unlink()
        send({"ended": named, "immortal": [[pid, command_line(pid)] for pid in sorted(left)]})

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


def state(pid: int) -> str:
    """A process's state as ps names it: R runs, S sleeps, D waits for a disk or a network share, T is stopped."""
    stat = read(f"/proc/{pid}/stat")
    return stat.rpartition(b")")[2].split()[0].decode() if stat else "gone"


def command_line(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    return read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def read(path: str) -> bytes:
    """A file of /proc; empty when the process is gone or another user's."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def send(message: dict[str, Any]) -> None:
    """A line to the launcher, which may be gone."""
    data = (json.dumps(message) + "\n").encode()
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        pass


def main(wish: dict[str, Any], probe: str) -> None:
    """Run the guard; `probe` is the text of probe.py."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    try:
        os.close(os.open(wish["roll_call"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        send({"error": "this is the same machine as another host of the job"})
        return
    except OSError as error:
        send({"error": "cannot write {}: {}".format(wish["roll_call"], error.strerror)})
        return
    try:
        send({"facts": collect(wish, probe)})
        Guard(wish).run()
    finally:
        with contextlib.suppress(OSError):
            Path(wish["roll_call"]).unlink()
        sys.stdout.flush()
