"""The keeper of a job on one of its hosts: it holds the memory from which the ranks of the next try go on (kept.py).

A keeper lives from the first try of a job to the end of the last one. Like a guard (guard.py), it is sent as text over
an ssh connection. Both sides send one JSON object per line:

    launcher: {"beat": 1, "wish": as kept.py    keeper: {"ready": 1}, or {"error": text}
               names it, "of": the try},
               every second
    launcher: {"ping": number}                  keeper: {"pong": number}
    launcher: {"room": number}                  keeper: {"room": number, and the fields of keepers.Room}

It ends, with all that it holds, when the connection closes, and when the launcher has been silent for
`silence_seconds` (0: never). Then this host is lost to the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
from pathlib import Path
from typing import Any

from mpitrain.launch.hearing import Hearing
from mpitrain.launch.kept import Kept

_LOOK_SECONDS = 1.0


def main(wish: dict[str, Any], _probe: str) -> None:
    """`wish` has the name of the socket, `keeper`, and `silence_seconds`."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the keeper needs two per rank
    try:
        kept = Kept(wish["keeper"])
    except OSError as error:
        _send({"error": str(error)})
        return
    _send({"ready": 1})
    received = b""
    hearing = Hearing(wish["silence_seconds"])
    while True:
        ready, _, _ = select.select([0, kept.fileno()], [], [], _LOOK_SECONDS)
        kept.look()
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            for message in map(json.loads, lines):
                kept.wish, kept.of = message.get("wish", kept.wish), message.get("of", kept.of)
                if "ping" in message:
                    _send({"pong": message["ping"]})
                if "room" in message:
                    _send({"room": message["room"], **_room(kept.pids())})
        if hearing.is_lost(has_come=0 in ready):
            return


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
