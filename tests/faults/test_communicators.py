"""MPI has only so many communicators."""

from __future__ import annotations

import pytest

from faults.outcome import failed
from jobs import run_job

SOURCE = """
import numpy
import mpitrain as mt

world = mt.init()
parameters = [mt.Parameter("a", (3,), numpy.dtype(numpy.float32))]
kept = [mt.GradientReducer(world, parameters, threaded=False) for _ in range(5000)]
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_reducers_in_a_loop(ranks: int) -> None:
    job = run_job(ranks, SOURCE)
    failed(job, "MPI has no further communicator", "make them once, not in a loop")
