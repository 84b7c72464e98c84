"""Sums for which the program never waits, and sums that only one rank starts."""

from __future__ import annotations

import pytest

from faults.outcome import report_of, succeeded
from jobs import run_job

START = """
import sys
import numpy
import mpitrain as mt
from mpitrain.allreduce import make_algorithm

world = mt.init()
algorithm = make_algorithm(world, sys.argv[1])
flat = numpy.full(300_000, world.rank + 1.0)
handle = algorithm.start(flat, agreed=AGREED)
"""
WAITED = """
if world.rank:
    handle.wait()
    assert (flat == 6).all()
"""
ALONE = """
handle.wait()
if world.rank == 1:
    algorithm.start(flat, agreed=AGREED)
"""


@pytest.mark.parametrize("name", ["ring", "direct", "shared_memory", "native"])
def test_a_rank_that_ends_without_waiting_still_takes_part(name: str) -> None:
    succeeded(run_job(3, (START + WAITED).replace("AGREED", "True"), name))


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("name", ["ring", "shared_memory"])
def test_a_sum_that_one_rank_starts_alone_is_an_error(name: str, agreed: bool) -> None:
    job = run_job(3, (START + ALONE).replace("AGREED", str(agreed)), name)
    assert report_of(job, "MismatchError: rank 1 on ", f"allreduce {name} of 300000 float64", "has finished").rank == 1
