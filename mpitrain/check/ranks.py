"""The programs of a check's ranks. They are sent to the job's Python as text, so they import nothing of mpitrain.

`python -c TEXT PROGRAM [TOKEN]`: TOKEN only marks the processes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from array import array
from pathlib import Path
from typing import Any

# For hello: below, near and above the size at which libraries change their protocol. For allreduce: large ones, for its
# speed.
_SIZES_BYTES = (1, 64 << 10, 4 << 20)
_SIZES_MIB = (1, 16, 64)
_REPETITIONS = 4
_MOST_SECONDS = 150  # the limit in any case, also on a busy machine


def say(**words: Any) -> None:
    """Print one line, in one write: mpiexec may put the output of other ranks between two writes."""
    print("mpitrain-check:" + json.dumps(words) + "\n", end="", flush=True)


def step_name(collective: str, size_bytes: int) -> str:
    """The name of a step."""
    return f"{collective} of {size_bytes} bytes"


def numbers(size_bytes: int, factor: int, offset: int) -> array[int]:
    """Whole numbers, each different."""
    if size_bytes < 8:
        return array("B", [(factor + offset) % 256] * size_bytes)
    return array("q", range(offset, offset + factor * (size_bytes // 8), factor))


def hello() -> None:
    """Report that the rank is running, which ranks it found, and whether its sums with the others are exact."""
    signal.alarm(_MOST_SECONDS)
    started = time.monotonic()
    say(host=socket.gethostname().split(".")[0])
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, num_ranks = world.rank, world.size
    world.Barrier()
    steps = [step_name(collective, size) for size in _SIZES_BYTES for collective in ("Allreduce", "Bcast")]
    say(size=num_ranks, first_seconds=time.monotonic() - started, steps=steps)
    for size_bytes in _SIZES_BYTES:
        kind = MPI.UINT8_T if size_bytes < 8 else MPI.INT64_T
        # Rank r gives i + r: the sum over all is n * i + n (n - 1) / 2.
        total = numbers(size_bytes, 0 if size_bytes < 8 else 1, rank)
        world.Allreduce(MPI.IN_PLACE, [total, kind])
        truth = numbers(size_bytes, 0 if size_bytes < 8 else num_ranks, num_ranks * (num_ranks - 1) // 2)
        say(step=step_name("Allreduce", size_bytes), is_right=total == truth)
        copy = numbers(size_bytes, 3 if rank == 0 else 1, 1)
        world.Bcast([copy, kind], root=0)
        say(step=step_name("Bcast", size_bytes), is_right=copy == numbers(size_bytes, 3, 1))


def death() -> None:
    """The last rank kills itself while the others wait for it."""
    signal.alarm(_MOST_SECONDS)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank == world.size - 1:
        say(dies=True)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    world.Barrier()


def allreduce() -> None:
    """Report how long an Allreduce over all ranks takes, for some sizes: the best of a few, on the slowest rank.

    Rank 0 reports it.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    boots = world.gather(boot_seconds())
    if boots is not None:
        boots.sort()
        say(num_machines=1 + sum(later - earlier > 2 for earlier, later in itertools.pairwise(boots)))
    for size_mib in _SIZES_MIB:
        content, total = bytearray(size_mib << 20), bytearray(size_mib << 20)
        took = []
        for _ in range(_REPETITIONS + 1):  # the first one sets up connections
            world.Barrier()
            started = time.perf_counter()
            world.Allreduce([content, MPI.FLOAT], [total, MPI.FLOAT])
            took.append(world.allreduce(time.perf_counter() - started, op=MPI.MAX))
        if world.rank == 0:
            say(size_bytes=size_mib << 20, seconds=min(took[1:]))


def boot_seconds() -> int:
    """The time at which this kernel started. Containers may have a boot_id of their own, but not a boot time."""
    return int(re.findall(r"(?m)^btime (\d+)", Path("/proc/stat").read_text())[0])


if __name__ == "__main__":
    {"hello": hello, "death": death, "allreduce": allreduce}[sys.argv[1]]()
