"""The keeper of a job on one of its hosts: it holds the memory from which the ranks of the next try go on (kept.py).

A keeper lives from the first try of a job to the end of the last one. Like a guard (guard.py), it is sent as text over
an ssh connection. Both sides send one JSON object per line:

    launcher: {"beat": 1, "wish": as kept.py    keeper: {"ready": 1}, or {"error": text}
               names it}, every second
    launcher: {"ping": number}                  keeper: {"pong": number}

It ends, with all that it holds, when the connection closes, and when the launcher has been silent for
`silence_seconds` (0: never). Then this host is lost to the job.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import time
from typing import Any

from mpitrain.launch.kept import Kept

_LOOK_SECONDS = 1.0
# After such a gap this host was silent, not the launcher: it was suspended or frozen.
_GAP_SECONDS = 5.0
# A keeper of the same job that was cut off from the launcher may be about to end.
_NAME_SECONDS = 5.0


def main(wish: dict[str, Any], _probe: str) -> None:
    """`wish` has the name of the socket, `keeper`, and `silence_seconds`."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_blocking(1, True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the keeper needs two per rank
    try:
        kept = _listen(wish["keeper"])
    except OSError as error:
        _send({"error": str(error)})
        return
    _send({"ready": 1})
    received = b""
    heard = looked = time.monotonic()
    while True:
        ready, _, _ = select.select([0, kept.fileno()], [], [], _LOOK_SECONDS)
        now = time.monotonic()
        if now - looked > _GAP_SECONDS:
            heard = now
        looked = now
        kept.look()
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            heard = now
            *lines, received = (received + data).split(b"\n")
            for message in map(json.loads, lines):
                kept.wish = message.get("wish", kept.wish)
                if "ping" in message:
                    _send({"pong": message["ping"]})
        elif wish["silence_seconds"] and now - heard > wish["silence_seconds"]:
            return


def _listen(name: str) -> Kept:
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            return Kept(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _send(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone
        os.write(1, (json.dumps(message) + "\n").encode())
