"""How long an Allreduce over all ranks takes, for some sizes: the best of a few, as the slowest rank sees it."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

_SIZES_MIB = (1, 16, 64)
_REPETITIONS = 4


def say(**words: float) -> None:
    """Print one line, in one write."""
    print("mpitrain-check:" + json.dumps(words) + "\n", end="", flush=True)


def boot_seconds() -> int:
    """The time at which this kernel started. Containers may have a boot_id of their own, but not a boot time."""
    return int(re.findall(r"(?m)^btime (\d+)", Path("/proc/stat").read_text())[0])


def main() -> None:
    """Measure, and let rank 0 say it."""
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


main()
