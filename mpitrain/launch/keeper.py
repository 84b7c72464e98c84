"""The keeper of a job on one of its hosts: it holds the memory from which the ranks of the next try go on (kept.py).

A keeper lives from the first try of a job to the end of the last one. Like a guard (guard.py), it is sent as text over
an ssh connection. Both sides send one JSON object per line:

    launcher: {"beat": 1, "wish": as kept.py    keeper: {"ready": 1}, or {"error": text}
               names it, "of": the try,
               "step": number}, every second
    launcher: {"ping": number}                  keeper: {"pong": number}
    launcher: {"room": number}                  keeper: {"room": number, and the fields of keepers.Room}
    launcher: {"estate": as estate.py says}
    launcher: {"inherit": 1}                    keeper: {"inherited": 1}, or {"error": text}
    launcher: {"stay": 1}                       keeper: {"stays": whether it holds something}
    launcher: {"bye": 1}

After "bye" it ends, with all that it holds. The launcher is lost if the connection closes without a "bye", or if the
launcher has been silent for `silence_seconds` (0: never). The keeper then waits for `keep_seconds` for the keeper of
another launcher, which inherits what it holds. If it holds nothing, or knows no estate, it ends at once. After "stay"
the launcher ends too, and tells its user so itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.launch.hearing import Hearing
from mpitrain.launch.kept import KeeperLine, Kept

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
        _send({"error": str(error)})
        return
    _send({"ready": 1})
    if _serve(kept, before, wish) and _holds(kept):
        _keep(kept, wish)


def _serve(kept: Kept, before: KeeperLine | None, wish: dict[str, Any]) -> bool:
    """Serve a launcher and its ranks to the end. True: it is lost. False: nobody needs this keeper any more."""
    received = b""
    hearing = Hearing(wish["silence_seconds"])
    while True:
        ready, _, _ = select.select([0, kept.fileno()], [], [], _LOOK_SECONDS)
        kept.look()
        if kept.is_dropped:
            return False
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return True
            *lines, received = (received + data).split(b"\n")
            for message in map(json.loads, lines):
                if "bye" in message:
                    return False
                _obey(kept, before, message)
                if "stay" in message:
                    if "stderr" in wish:
                        os.close(wish.pop("stderr"))
                    _send({"stays": _holds(kept)})
                    return True
        if hearing.is_lost(has_come=0 in ready):
            return True


def _obey(kept: Kept, before: KeeperLine | None, message: dict[str, Any]) -> None:
    kept.wish, kept.of = message.get("wish", kept.wish), message.get("of", kept.of)
    kept.step = message.get("step", kept.step)
    if "estate" in message:
        kept.estate = json.dumps(message["estate"])
    if "ping" in message:
        _send({"pong": message["ping"]})
    if "room" in message:
        _send({"room": message["room"], **_room(kept.pids())})
    if "inherit" in message and before is not None:
        try:
            kept.inherit(before)
            _send({"inherited": 1})
        except OSError as error:
            _send({"error": f"what its keeper holds cannot be taken over: {error}"})


def _holds(kept: Kept) -> bool:
    return kept.has_memory and bool(kept.estate)


def _keep(kept: Kept, wish: dict[str, Any]) -> None:
    """Wait for another launcher, or until nobody wants it any more."""
    now = time.time()
    kept.loss = {"lost_ms": int(1000 * now), "until_ms": int(1000 * (now + wish["keep_seconds"]))}
    until = time.monotonic() + wish["keep_seconds"]
    if "stderr" in wish:
        _say(wish["stderr"], kept)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # nobody is to wait for the end of this process
        os.dup2(nothing, descriptor)
    while not kept.is_dropped and (time.monotonic() < until or kept.is_claimed):
        select.select([kept.fileno()], [], [], _LOOK_SECONDS)
        kept.look()


def _say(descriptor: int, kept: Kept) -> None:
    """Tell the user of the launcher, where its output is still read."""
    job = json.loads(kept.estate)["tries"][-1]
    until = time.strftime("%H:%M:%S", time.localtime(kept.loss["until_ms"] / 1000))
    text = (
        f"mpitrain: job {job} has lost its launcher; its state is kept in memory until {until}. To go on: "
        f"`mpitrain run --resume {job}`. To drop it: `mpitrain kill {job}`\n"
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
            f"its keeper has just ended ({error}): somebody else goes on with this job, or has dropped it"
        ) from None
    if heir != wish["heir"]:
        raise OSError(f"{heir} goes on with this job")
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


def _send(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone
        os.write(1, (json.dumps(message) + "\n").encode())
