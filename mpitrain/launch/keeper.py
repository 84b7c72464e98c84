"""The memory of a job on a host: the keeper, a child of the agent that outlives it (kept.py), and the line to it.

The ranks of the next attempt continue from this memory, so it must not end with the agent (agent.py), which somebody
may kill. The agent forks the keeper, and leads it at its socket, as any later agent of the job can on this host. So
there is one protocol, that of kept.py.

While no agent leads it, the keeper waits: as long as the launcher lives, if that is on this host, then for
`keep_seconds` for the agent of another launcher (`mpitrain resume`). If it holds nothing, or knows no estate, it ends
at once; and on another host than the launcher's when that host says that the job continues without this one, or is over
(`SetAside`). After "stay" the launcher ends too, and tells its user so itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import shlex
import socket
import subprocess
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.launch.hearing import send
from mpitrain.launch.kept import KeeperLine, Kept, drop
from mpitrain.launch.processes import launcher_pid
from mpitrain.watching.proc import opened

_SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none")
# Not at once: if only the agent was killed, the launcher sends another one, which takes seconds on a busy host.
_FIRST_SECONDS, _EVERY_SECONDS, _SSH_SECONDS = 20.0, 60.0, 30.0
_DOUBT_SECONDS = 10.0  # the launcher may have gone with its host just before the silence began
_LOOK_SECONDS = 1.0
_LED_SECONDS = 60.0  # so long an agent may take to lead the keeper that it has just forked
_ANSWER_SECONDS = 3.0  # a keeper that does not answer in this time is replaced by a new one, which holds nothing


class SetAside:
    """Ask `is_sure` once a second. It does not wait: ssh runs beside it, once a minute."""

    def __init__(self, keeper: str, estate: str, silence_seconds: float) -> None:
        """`keeper` is the name of the sockets of its keepers. The launcher was heard `silence_seconds` ago or later."""
        told = json.loads(estate)
        self._keeper, self._own = keeper, str(told.get("own", ""))
        _, self._pid, self._ticks = [*str(told.get("launcher", "")).split(), "", "", ""][:3]
        self._has_keeper = self._own in [place[0] for place in told.get("places", [])]
        self._heard = time.monotonic() - silence_seconds
        self._next = time.monotonic() + random.uniform(1.0, 1.5) * _FIRST_SECONDS  # all keepers may ask at once
        self._ssh: subprocess.Popen[str] | None = None

    def is_sure(self) -> bool:
        """True when the launcher's host has said that what this keeper holds is of no use."""
        if self._ssh is None and time.monotonic() > self._next and self._pid.isdigit():
            line = f"cat /proc/uptime /proc/{self._pid}/stat; grep -c @{shlex.quote(self._keeper)} /proc/net/unix"
            command = ["timeout", str(_SSH_SECONDS), *_SSH, "--", self._own, f"sh -c {shlex.quote(line)}"]
            with contextlib.suppress(OSError):
                self._ssh = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            self._next = time.monotonic() + random.uniform(0.5, 1.0) * _EVERY_SECONDS
        if self._ssh is None or self._ssh.poll() is None:
            return False
        answer, _ = self._ssh.communicate()
        self._ssh = None
        try:
            return self._judge(answer.splitlines())
        except (ValueError, IndexError):  # the host cannot be reached
            return False

    def _judge(self, lines: list[str]) -> bool:
        """`lines`: for how long the host is up, the state of the launcher's process if it is there, and how many
        keepers of the job are there."""
        up_seconds, num_keepers = float(lines[0].split()[0]), int(lines[-1])
        if len(lines) == 3 and lines[1].rpartition(")")[2].split()[19] == self._ticks:
            return True
        is_same_boot = up_seconds > time.monotonic() - self._heard + _DOUBT_SECONDS
        return num_keepers == 0 and self._has_keeper and is_same_boot


class HeldMemory:
    """The agent's line to the keeper."""

    def __init__(self, silence_seconds: float, stderr: int | None) -> None:
        """After `silence_seconds` the agent takes its launcher for lost; 0: it is on this host, and this its stderr."""
        self._silence_seconds, self._stderr = silence_seconds, stderr
        self._line: KeeperLine | None = None

    def obey(self, message: dict[str, Any]) -> None:
        """Do what the launcher says."""
        try:
            if "name" in message:
                answer = self._open(message)
            elif "drop" in message:
                drop(message["drop"])
                answer = {"dropped": 1}
            elif self._line is None:
                answer = {}
            else:
                answer = self._ask(self._line, message)
        except OSError as error:
            answer = {"error": str(error)}
        if answer:
            send({"memory": {"number": message.get("number", 0), **answer}})

    def _ask(self, line: KeeperLine, message: dict[str, Any]) -> dict[str, Any]:
        self._tell(line, message)
        if "room" in message:
            return _room(line.pids())
        if "rename" in message:
            line.rename(message["rename"], message["launcher"])
            return {"inherited": 1}
        if "stay" in message:
            stays = line.stay()
            if not stays:
                line.drop()
            self.leave()
            return {"stays": stays}
        if "leave" in message:
            self.leave()
        return {}

    @staticmethod
    def _tell(line: KeeperLine, message: dict[str, Any]) -> None:
        told: dict[str, Any] = {name: message[name] for name in ("wish", "of", "step") if name in message}
        if told or "estate" in message:
            with contextlib.suppress(BlockingIOError):  # it takes in nothing now
                line.tell(told, json.dumps(message["estate"]) if "estate" in message else "")

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Lead the keeper of the job here: the one that is led, the one that is there, or a new one."""
        is_led = self._line is not None
        line = self._led()
        if not (line or is_led or message.get("is_new")):
            line = self._found(message)
        if line is None:
            self._fork(message)
            line = self._found(message)
        if line is None:
            raise OSError("it has ended at once")
        self._line = line
        self._tell(line, message)
        return {"ready": line.pid}

    def _led(self) -> KeeperLine | None:
        """The line, if its keeper answers."""
        line, self._line = self._line, None
        if line is not None:
            try:
                line.pids()
            except OSError as error:
                if isinstance(error, socket.timeout):  # TimeoutError is another one in old Pythons
                    line.kill()
                line.close()
                return None
        return line

    def _found(self, message: dict[str, Any]) -> KeeperLine | None:
        """A line to the keeper that is there; None: none is there.

        Raises:
            OSError: another launcher leads it; or it must be there, because it is to be inherited by an heir.
        """
        try:
            line = KeeperLine(message["name"], answer_seconds=_ANSWER_SECONDS)
        except ConnectionRefusedError as error:
            if "heir" in message:
                text = f"its keeper has just ended ({error}): somebody else continues with this job, or has dropped it"
                raise OSError(text) from None
            return None
        launcher = message.get("heir", message["launcher"])
        leader = line.lead(launcher, [] if self._stderr is None else [self._stderr])
        if leader != launcher:
            line.close()
            raise OSError(f"{leader} continues with this job")
        return line

    def _fork(self, message: dict[str, Any]) -> None:
        name = message["name"]
        kept = Kept(name, partial(drop, name), message["keep_seconds"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child needs nothing that a thread of this process may hold
            pid = os.fork()
        if pid == 0:
            try:
                _leave_the_agent(kept)
                keep(kept, self._silence_seconds)
            finally:
                os._exit(0)
        kept.close()

    def leave(self) -> None:
        """Let the keeper wait for another agent."""
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def drop(self) -> None:
        """Have the keeper end, with all that it holds."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.drop()
            self.leave()


def _leave_the_agent(kept: Kept) -> None:
    """Hold nothing open of the agent that has forked this process: others wait for its end."""
    gc.freeze()  # what the agent has left would close files of this process
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    own = {0, 1, 2, *kept.descriptors()}
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(entry) not in own:
            with contextlib.suppress(OSError):  # of this look itself
                os.close(int(entry))


def keep(kept: Kept, silence_seconds: float) -> None:
    """Serve ranks and agents until nobody wants what is held, or may want it any more."""
    aside: SetAside | None = None
    until: float | None = time.monotonic() + _LED_SECONDS
    while not kept.is_dropped:
        select.select([kept.fileno()], [], [], _LOOK_SECONDS)
        kept.look()
        if kept.is_led:
            until = aside = None
            continue
        if until is None:  # its agent has gone
            if not kept.holds:
                return
            if not kept.loss:
                if launcher_pid(str(json.loads(kept.estate).get("launcher", ""))) is not None:
                    continue  # which sends another agent
                kept.lose()
                _say(kept)
            until = time.monotonic() + kept.loss["until_ms"] / 1000 - time.time()
        if time.monotonic() >= until:
            return
        if silence_seconds and kept.loss:
            aside = aside or SetAside(kept.name, kept.estate, silence_seconds)
            if aside.is_sure():
                return


def _say(kept: Kept) -> None:
    """Tell the user of the launcher, where its output is still read."""
    if kept.stderr is None:
        return
    job = json.loads(kept.estate)["tries"][-1]
    until = time.strftime("%H:%M:%S", time.localtime(kept.loss["until_ms"] / 1000))
    text = (
        f"mpitrain: job {job} has lost its launcher; its state is kept in memory until {until}. To continue: "
        f"`mpitrain resume {job}`. To drop it: `mpitrain kill {job}`\n"
    )
    with contextlib.suppress(OSError):
        if select.select([], [kept.stderr], [], 0.0)[1]:  # a terminal may be stopped
            os.write(kept.stderr, text.encode())
    os.close(kept.stderr)
    kept.stderr = None


def _room(pids: list[int]) -> dict[str, Any]:
    """What these ranks hold, and what is free."""
    anonymous = sum(_kilobytes(f"/proc/{pid}/status", "RssAnon") for pid in pids)
    return {
        "num_ranks": len(pids),
        "held_bytes": 1024 * anonymous,
        "free_bytes": 1024 * _kilobytes("/proc/meminfo", "MemAvailable"),
        "has_gpu": any(what.startswith("/dev/nvidia") for pid in pids for _, what in opened(pid)),
    }


def _kilobytes(path: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
