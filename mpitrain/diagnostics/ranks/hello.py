"""A rank says that it is there, who it found, and whether what it added up with the others is exact."""

from __future__ import annotations

import json
import signal
import socket
import time
from array import array
from typing import Any

signal.alarm(150)  # whatever happens, also on a busy machine
_SIZES_BYTES = (1, 64 << 10, 4 << 20)  # below, about and above where libraries change how they send


def say(**words: Any) -> None:
    """Print one line, in one write: mpiexec may put the output of other ranks between two writes."""
    print("mpitrain-check:" + json.dumps(words) + "\n", end="", flush=True)


def step_name(collective: str, size_bytes: int) -> str:
    """A step, in words."""
    return f"{collective} of {size_bytes} bytes"


def numbers(size_bytes: int, factor: int, offset: int) -> array[int]:
    """Whole numbers, each different."""
    if size_bytes < 8:
        return array("B", [(factor + offset) % 256] * size_bytes)
    return array("q", range(offset, offset + factor * (size_bytes // 8), factor))


def main() -> None:
    """Say it."""
    started = time.monotonic()
    host = socket.gethostname().split(".")[0]
    say(host=host)
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


main()
