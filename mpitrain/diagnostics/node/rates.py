"""The speed of the way to another node, of a computation, and of the share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.node import children
from mpitrain.diagnostics.node.ways import connect, receive, round_trip, waited_seconds

_TRIALS = 5
_TRIAL_SECONDS = 0.2
_BLOCK = bytes(1 << 18)
_MOST_BYTES = 1 << 25


def way(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the best of some trials to each port that `listen` opened at `address`: echoes, and bytes per second.

    "waited" is the part of the trials' time in which the threads at both ends waited for a processor.
    """
    with connect(wish["address"], wish["echo_port"], b"e") as connection:
        latency = min(round_trip(connection, 8) for _ in range(50)) / 2
    best, there = 0.0, 0.0
    with connect(wish["address"], wish["sink_port"], b"s") as connection:
        connection.settimeout(10.0)
        _push(connection, len(_BLOCK))  # TCP starts slowly
        count = len(_BLOCK)
        begun, waited = time.perf_counter(), waited_seconds()
        for _ in range(_TRIALS):
            seconds, waited_there = _push(connection, count)
            there += waited_there
            best = max(best, count / seconds)
            # Enough data that a trial takes its time on slow and fast links.
            count = int(min(max(best * _TRIAL_SECONDS, len(_BLOCK)), _MOST_BYTES)) // len(_BLOCK) * len(_BLOCK)
    shares = [part / (time.perf_counter() - begun) for part in (waited_seconds() - waited, there)]
    return {"latency_seconds": latency, "bytes_per_second": best, "waited": shares}


def _push(connection: Any, count: int) -> tuple[float, float]:
    """Return how long `count` bytes take to arrive there, and how long the receiver waited for a processor."""
    started = time.perf_counter()
    connection.sendall(count.to_bytes(8, "big"))
    for _ in range(count // len(_BLOCK)):
        connection.sendall(_BLOCK)
    waited = receive(connection, 8)
    return time.perf_counter() - started, int.from_bytes(waited, "big") / 1e9


def compute(_wish: dict[str, Any]) -> list[float]:
    """Return the times of a fixed computation. It runs in a child, because this process's threads would slow it."""
    code = (
        "import time\n"
        "for _ in range(9):\n"
        "    started = time.perf_counter()\n"
        "    x = 1\n"
        "    for i in range(1500000):\n"
        "        x = (x * 1103515245 + i) & 0x7fffffff\n"
        "    print(time.perf_counter() - started, flush=True)\n"
    )
    _code, out, err = children.run(["/usr/bin/python3", "-c", code], 40.0)
    if not out:
        raise RuntimeError(err.strip() or "the computation gave nothing")
    return [float(line) for line in out.split()]


def share(wish: dict[str, Any]) -> dict[str, float]:
    """Write and remove a file of `bytes` and 100 small ones in `folder`, in a child, which alone hangs on a dead
    share."""
    folder = Path(wish["folder"])
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "folder, count = Path(sys.argv[1]), int(sys.argv[2])\n"
        "folder.mkdir()\n"
        "block = os.urandom(1 << 20)\n"
        "started = time.perf_counter()\n"
        "with open(folder / 'large', 'wb') as file:\n"
        "    for _ in range(count >> 20):\n"
        "        file.write(block)\n"
        "    file.flush()\n"
        "    os.fsync(file.fileno())\n"
        "print(count / (time.perf_counter() - started))\n"
        "started = time.perf_counter()\n"
        "for number in range(100):\n"
        "    (folder / str(number)).write_text('x')\n"
        "print(100 / (time.perf_counter() - started))\n"
    )
    children.makes(str(folder))
    try:
        ended, out, err = children.run(["/usr/bin/python3", "-c", code, str(folder), str(wish["bytes"])], 25.0)
    finally:
        children.run(["rm", "-rf", str(folder)], 10.0)
        children.removed(str(folder))
    if ended != 0:
        raise OSError(err.strip().splitlines()[-1] if err.strip() else "writing failed")
    rate, files = out.split()
    return {"bytes_per_second": float(rate), "files_per_second": float(files)}


CALLS = {"way": way, "compute": compute, "share speed": share}
