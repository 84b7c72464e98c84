"""MPI has a limited number of communicators."""

from __future__ import annotations

import pytest

from faults.outcome import failed, succeeded
from jobs import run_job

START = """
import numpy
import mpitrain as mt

world = mt.init()
parameters = [mt.Parameter("a", (3,), numpy.dtype(numpy.float32))]
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_reducers_in_a_loop(ranks: int) -> None:
    """All but 20 of the communicators are in use before, because 2000 reducers take long to make."""
    source = (
        "from mpi4py import MPI\n"
        "taken = []\n"
        "try:\n"
        "    while True:\n        taken.append(world.comm.Dup())\n"
        "except MPI.Exception:\n"
        "    for comm in taken[:20]:\n        comm.Free()\n"
        "kept = [mt.GradientReducer(world, parameters, threaded=False) for _ in range(5000)]"
    )
    failed(run_job(ranks, START + source), "MPI has no further communicator", "close those that are used no more")


def test_what_is_given_back_can_be_had_again() -> None:
    """The test makes and frees more than MPI has. (test_worlds.py counts those of whole worlds.)"""
    succeeded(run_job(2, START + "for _ in range(2500):\n    world.apart().free()"))
