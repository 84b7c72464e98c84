"""Shared by the tests of failing jobs: the beginning of their scripts, and what the other ranks do meanwhile."""

from __future__ import annotations

import pytest

START = """
import atexit, os, pathlib, signal, sys, threading, time
import numpy
import mpitrain as mt

world = mt.init()
rank = world.rank
"""

# For tests that do not depend on the MPI library, or depend only on MPICH.
MOSTLY_MPICH = pytest.mark.parametrize(
    "vendor", ["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)], indirect=True
)
# What the other ranks do while rank 1 fails.
OTHERS = {
    "mean": "while True: world.mean(numpy.ones(5))",
    "mean of a ring": "world.mean(numpy.ones(2**20))",
    "barrier": "world.barrier()",
    "broadcast": "world.broadcast_object('x', root=1)",
    "receive": "world.recv(1)",
    "send": "world.send(numpy.ones(2**20), 1)",
    "reducer": """
reducer.begin(1)
reducer.ready(0, numpy.ones(3))
reducer.finish()
""",
    "alone": "time.sleep(1000)",
    "finished": "sys.exit(0)",
}
REDUCER = "reducer = mt.GradientReducer(world, [mt.Parameter('w', (3,), numpy.dtype('float64'))])\n"


def others_and(rank: int, ending: str, doing: str) -> str:
    """Rank `rank` ends shortly after all the others have begun to do something."""
    body = "\n".join("    " + line for line in OTHERS[doing].strip().splitlines())
    return START + REDUCER + f"if rank == {rank}:\n    time.sleep(0.3)\n    {ending}\nelse:\n{body}\n"
