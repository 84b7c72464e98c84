"""The last rank kills itself while the others wait for it. The argument only marks the processes."""

from __future__ import annotations

import os
import signal
import time

signal.alarm(150)  # whatever happens, also on a busy machine


def main() -> None:
    """Die, or wait."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank == world.size - 1:
        print('mpitrain-check:{"dies": true}\n', end="", flush=True)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    world.Barrier()


main()
