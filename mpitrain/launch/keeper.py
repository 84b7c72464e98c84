"""The keeper of a job on one of its hosts: it holds the memory from which the ranks of the next attempt continue
(kept.py).

A keeper lives from the first attempt of a job to the end of the last one. Like a guard (agent.py), it is sent as text
over an ssh connection. Both sides send one JSON object per line:

    launcher: {"beat": 1, "wish": as kept.py    keeper: {"ready": 1}, or {"error": text}
               names it, "of": the try,
               "step": number}, every second
    launcher: {"ping": number}                  keeper: {"pong": number}
    launcher: {"room": number}                  keeper: {"room": number, and the fields of keepers.Room}
    launcher: {"estate": as keepers.py says}
    launcher: {"inherit": 1}                    keeper: {"inherited": 1}, or {"error": text}
    launcher: {"stay": 1}                       keeper: {"stays": whether it holds something}
    launcher: {"bye": 1}

After "bye" it ends, with all that it holds. The launcher is lost if the connection closes without a "bye", or if the
launcher has been silent for `silence_seconds` (0: never). The keeper then waits for `keep_seconds` for the keeper of
another launcher, which inherits what it holds. If it holds nothing, or knows no estate, it ends at once; and on another
host than the launcher's when that host says that the job continues without this one, or is over (keeper.py). After
"stay" the launcher ends too, and tells its user so itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import shlex
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.launch.hearing import Hearing, send
from mpitrain.launch.kept import KeeperLine, Kept
from mpitrain.reading import MessageLines

_SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none")
_FIRST_SECONDS, _EVERY_SECONDS, _SSH_SECONDS = 10.0, 60.0, 30.0
_DOUBT_SECONDS = 10.0  # the launcher may have gone with its host just before the silence began


class SetAside:
    """Ask `is_sure` once a second. It does not wait: ssh runs beside it, once a minute."""

    def __init__(self, keeper: str, estate: str, silence_seconds: float) -> None:
        """`keeper` is the name of the sockets of its keepers. The launcher was heard `silence_seconds` ago or later."""
        told = json.loads(estate)
        self._keeper, self._own = keeper, str(told.get("own", ""))
        _, self._pid, self._ticks = [*str(told.get("launcher", "")).split(), "", "", ""][:3]
        self._has_keeper = self._own in [place[0] for place in told.get("places", [])]
        self._heard = time.monotonic() - silence_seconds
        self._next = time.monotonic() + random.uniform(0.0, _FIRST_SECONDS)  # all keepers may ask at once
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


_LOOK_SECONDS = 1.0


def main(wish: dict[str, Any], _probe: str) -> None:
    """Run the keeper.

    `wish` has the name of the socket, `keeper`, and both times. A keeper that is to inherit has the socket of the other
    one, `inherits`, and for whom it claims that, `heir`. `stderr` is a descriptor of the launcher's own.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the keeper needs two per rank
    try:
        kept = Kept(wish["keeper"], partial(_end_other, wish["keeper"]))
        before = _claimed(wish) if "inherits" in wish else None
    except OSError as error:
        send({"error": str(error)})
        return
    send({"ready": 1})
    if _serve(kept, before, wish) and _holds(kept):
        _keep(kept, wish)


def _serve(kept: Kept, before: KeeperLine | None, wish: dict[str, Any]) -> bool:
    """Serve a launcher and its ranks to the end. True: it is lost. False: nobody needs this keeper any more."""
    hearing = Hearing(wish["silence_seconds"])
    try:
        return _listen(kept, before, wish, hearing)
    finally:
        hearing.close()


def _listen(kept: Kept, before: KeeperLine | None, wish: dict[str, Any], hearing: Hearing) -> bool:
    received = MessageLines()
    while True:
        ready, _, _ = select.select([0, kept.fileno()], [], [], _LOOK_SECONDS)
        kept.look()
        if kept.is_dropped:
            return False
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return True
            for message in received.take(data):
                if "bye" in message:
                    return False
                _obey(kept, before, message)
                if "stay" in message:
                    if "stderr" in wish:
                        os.close(wish.pop("stderr"))
                    send({"stays": _holds(kept)})
                    return True
        if hearing.is_lost(has_come=0 in ready):
            return True


def _obey(kept: Kept, before: KeeperLine | None, message: dict[str, Any]) -> None:
    kept.wish, kept.of = message.get("wish", kept.wish), message.get("of", kept.of)
    kept.step = message.get("step", kept.step)
    if "estate" in message:
        kept.estate = json.dumps(message["estate"])
    if "ping" in message:
        send({"pong": message["ping"]})
    if "room" in message:
        send({"room": message["room"], **_room(kept.pids())})
    if "inherit" in message and before is not None:
        try:
            kept.inherit(before)
            send({"inherited": 1})
        except OSError as error:
            send({"error": f"what its keeper holds cannot be taken over: {error}"})


def _holds(kept: Kept) -> bool:
    return kept.has_memory and bool(kept.estate)


def _keep(kept: Kept, wish: dict[str, Any]) -> None:
    """Wait for another launcher, or until nobody wants it any more."""
    now = time.time()
    kept.loss = {"lost_ms": int(1000 * now), "until_ms": int(1000 * (now + wish["keep_seconds"]))}
    until = time.monotonic() + wish["keep_seconds"]
    if "stderr" in wish:
        _say(wish["stderr"], kept)
    silence_seconds = wish["silence_seconds"]  # 0: this is the launcher's host
    aside = SetAside(wish["keeper"], kept.estate, silence_seconds) if silence_seconds else None
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # nobody is to wait for the end of this process
        os.dup2(nothing, descriptor)
    while not kept.is_dropped and (time.monotonic() < until or kept.is_claimed):
        select.select([kept.fileno()], [], [], _LOOK_SECONDS)
        kept.look()
        if aside is not None and not kept.is_claimed and aside.is_sure():
            return


def _say(descriptor: int, kept: Kept) -> None:
    """Tell the user of the launcher, where its output is still read."""
    job = json.loads(kept.estate)["tries"][-1]
    until = time.strftime("%H:%M:%S", time.localtime(kept.loss["until_ms"] / 1000))
    text = (
        f"mpitrain: job {job} has lost its launcher; its state is kept in memory until {until}. To continue: "
        f"`mpitrain resume {job}`. To drop it: `mpitrain kill {job}`\n"
    )
    with contextlib.suppress(OSError):
        if select.select([], [descriptor], [], 0.0)[1]:  # a terminal may be stopped
            os.write(descriptor, text.encode())
    os.close(descriptor)


def _claimed(wish: dict[str, Any]) -> KeeperLine:
    """A line to the keeper that is to be inherited from, which nobody else has claimed."""
    try:
        line = KeeperLine(wish["inherits"])
        heir = line.claim(wish["heir"])
    except OSError as error:
        raise OSError(
            f"its keeper has just ended ({error}): somebody else continues with this job, or has dropped it"
        ) from None
    if heir != wish["heir"]:
        raise OSError(f"{heir} continues with this job")
    return line


def _end_other(name: str) -> None:
    """End the keeper that has the name: the same launcher has given it up, and what it holds is older."""
    with contextlib.suppress(OSError):
        line = KeeperLine(name)
        try:
            line.drop()
        finally:
            line.close()


def _room(pids: list[int]) -> dict[str, Any]:
    """What these ranks hold, and what is free."""
    anonymous = sum(_kilobytes(f"/proc/{pid}/status", "RssAnon") for pid in pids)
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")]
    return {
        "num_ranks": len(pids),
        "held_bytes": 1024 * anonymous,
        "free_bytes": 1024 * _kilobytes("/proc/meminfo", "MemAvailable"),
        "has_gpu": any(_target(link).startswith("/dev/nvidia") for link in links),
    }


def _kilobytes(path: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):  # closed meanwhile
        return os.readlink(link)  # noqa: PTH115 (Path.readlink is of Python 3.9)
    return ""
