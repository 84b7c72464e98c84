"""Speeds, really measured: over this machine's loopback, and on a processor that somebody else uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.diagnostics.node import rates, ways

# One processor for a loop and for what computes beside it.
SHARED_PROCESSOR = """
import os, subprocess, sys, time
from mpitrain.diagnostics.node.ways import waited_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    begun, waited, used = time.perf_counter(), waited_seconds(), time.thread_time()
    while time.thread_time() - used < 0.5:
        pass
    waited, wall = waited_seconds() - waited, time.perf_counter() - begun
finally:
    loop.kill()
    loop.wait()
print(waited, wall)
"""


def test_a_way() -> None:
    echo, sink = (ways.listen({"address": "127.0.0.1", "seconds": 20.0}) for _ in range(2))
    found = rates.way({"address": "127.0.0.1", "echo_port": echo, "sink_port": sink})
    assert found["latency_seconds"] > 0 and found["bytes_per_second"] > 0
    here, there = found["waited"]
    assert 0 <= here < 1 and 0 <= there < 1


def test_how_long_a_thread_waits_for_a_processor() -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count how long a thread waits")
    command = [sys.executable, "-c", SHARED_PROCESSOR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    waited, wall = map(float, done.stdout.split())
    # It was on the processor for 0.5 s. The rest it waited for it, but for what the machine itself was held up.
    assert 0 < waited <= wall - 0.5 + 0.1
