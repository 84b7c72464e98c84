"""Really measured speeds: over this machine's loopback, and on a processor that another program uses."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpitrain.check.node import ways

# One processor for a loop and for the other program. For each processor, the eighth number in /proc/stat is the time
# that the machine below has taken, in ticks.
SHARED_PROCESSOR = """
import os, subprocess, sys, time
from mpitrain.check.node.ways import waited_seconds
processor = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {processor})

def stolen():
    (line,) = [line for line in open("/proc/stat") if line.startswith(f"cpu{processor} ")]
    return int(line.split()[8]) / os.sysconf("SC_CLK_TCK")

loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    begun, waited, used, taken = time.perf_counter(), waited_seconds(), time.thread_time(), stolen()
    while time.thread_time() - used < 0.5:
        pass
    waited, wall = waited_seconds() - waited, time.perf_counter() - begun
    print(waited, wall, time.thread_time() - used, stolen() - taken)
finally:
    loop.kill()
    loop.wait()
"""


class Slow:
    """A slow sink. It reports that it has waited for a quarter of its time."""

    RATE = 8 << 20  # bytes per second

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.counts: list[int] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self.server.accept()
        with self.server, connection:
            assert connection.recv(1) == b"s"
            while head := connection.recv(8, socket.MSG_WAITALL):
                count = int.from_bytes(head, "big")
                ways.receive(connection, count)
                time.sleep(count / self.RATE)
                self.counts.append(count)
                connection.sendall(int(1e9 * count / self.RATE / 4).to_bytes(8, "big"))


def test_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial can be faster than the sink. The best is not slower than the mean of all trials."""
    told = iter([3.0, 3.5])
    monkeypatch.setattr(ways, "waited_seconds", lambda: next(told))
    echo, sink = ways.listen({"address": "127.0.0.1", "seconds": 20.0}), Slow()
    begun = time.perf_counter()
    found = ways.way({"address": "127.0.0.1", "echo_port": echo, "sink_port": sink.server.getsockname()[1]})
    wall = time.perf_counter() - begun
    first, *trials = sink.counts
    assert (first, trials[0], len(trials)) == (1 << 18, 1 << 18, 5)
    slept = sum(trials) / Slow.RATE
    assert 0 < found["latency_seconds"] <= wall / 100  # the least of 50 round trips
    assert sum(trials) / wall <= found["bytes_per_second"] <= Slow.RATE
    # The amount for a fifth of a second at the best rate so far, in whole blocks.
    assert all(0 < count <= 0.2 * Slow.RATE and count % (1 << 18) == 0 for count in trials)
    here, there = found["waited"]
    assert 0.5 / wall <= here <= 0.5 / slept
    assert slept / 4 / wall <= there <= 0.25 + 1e-6


def test_how_long_a_thread_waits_for_a_processor() -> None:
    """The thread runs or waits all the time, except while the machine itself is held up."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count how long a thread waits")
    command = [sys.executable, "-c", SHARED_PROCESSOR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    waited, wall, used, stolen = map(float, done.stdout.split())
    assert wall - used > 0.1  # the other program had its part
    assert wall - used - stolen - 0.05 <= waited <= wall - used + 0.01
