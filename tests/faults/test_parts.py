"""Worlds of some ranks of a job: a rank that waits in one hears at once when another rank fails or ends."""

from __future__ import annotations

import subprocess
from itertools import product

import pytest

from faults.outcome import failed, report_of, succeeded
from jobs import VENVS, run_job

# Ranks 0 and 2 of three. Rank 1 ends at the beginning.
START = """
import os, sys
import numpy
import mpitrain as mt
from mpitrain import collectives
from mpitrain.job.worlds import make_world

world = mt.init()
if world.rank == 1:
    sys.exit()
part = make_world(world.comm.Create_group(world.comm.group.Incl([0, 2])), parent=world)
assert (part.rank, part.size, part.parent) == (world.rank // 2, 2, world)


def call():
    assert part.sum(10**part.rank) == 11


def begin():
    assert collectives.allgather(part, numpy.full(1, part.rank)).wait().tolist() == [0, 1]
"""
TORCH = """
import os, sys
import torch
import torch.distributed as dist
import mpitrain.torch

dist.init_process_group("mpitrain")
rank = dist.get_rank()
group = dist.new_group([0, 2])
if rank == 1:
    sys.exit()


def call():
    value = torch.full((3,), 10.0 ** (rank // 2))
    dist.all_reduce(value, group=group)
    assert value.tolist() == [11.0] * 3
"""
FATES = {"ends": "sys.exit()", "raises": "raise KeyError('no such batch')", "is killed": "os.kill(os.getpid(), 9)"}
END = """
for _ in range(3):
    CALL()
if RANK == 2:
    FATE
CALL()
"""
CALLS = {
    "sum": (START, "call", "world.rank", "sum"),
    "collectives": (START, "begin", "world.rank", "collectives.allgather of int64"),
    "torch": (TORCH, "call", "rank", "all_reduce of 3 float32"),
}


# PyTorch adds the text of a wait, which only the end of a rank shows. What the collectives add is the same with both
# MPI libraries.
SLOW = {("torch", "raises", "mpich"), ("torch", "is killed", "mpich")}
SLOW |= {(kind, fate, "openmpi") for kind in ("collectives", "torch") for fate in FATES}
ALL = [
    pytest.param(*one, marks=[pytest.mark.nightly] if one in SLOW else [])
    for one in product(CALLS, FATES, ("mpich", "openmpi"))
]


@pytest.mark.parametrize(("kind", "fate", "launcher"), ALL)
def test_the_others_hear_of_it(kind: str, fate: str, launcher: str) -> None:
    source, call, rank, doing = CALLS[kind]
    if kind == "torch":
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        tried = subprocess.run([VENVS[launcher] / "bin/python", "-c", probe], check=False)
        if tried.returncode:
            pytest.skip("PyTorch is not installed")
    end = END.replace("CALL", call).replace("RANK", rank).replace("FATE", FATES[fate])
    job = run_job(3, source + end, launcher=launcher, python=launcher, timeout=100)
    if fate == "is killed":
        failed(job)
    elif fate == "raises":
        assert report_of(job, "KeyError: 'no such batch'").rank == 2
    else:
        report = report_of(
            job, "MismatchError: rank 0 on ", f"waits in {doing}", "but rank 2 on ", " has finished (after "
        )
        assert report.rank == 0


def test_calls_are_counted_for_each_world() -> None:
    """The note of a rank that ends has its number of calls in each of its worlds, even in a freed one."""
    source = """
import mpitrain as mt
from mpitrain.job.worlds import make_world

world = mt.init()
pair = (0, 2) if world.rank != 1 else (1,)
part = make_world(world.comm.Split(world.rank == 1, world.rank), parent=world)
inner = make_world(part.comm, parent=part)
assert part.control.members == inner.control.members == pair
assert inner.name(inner.size - 1) == world.name(pair[-1])
for _ in range(5):
    part.barrier()
for _ in range(3):
    inner.barrier()
inner.free()
if world.rank == 0:
    notes = world.control.notes
    while 2 not in notes.read:
        notes.look()
    made = notes.read[2].made
    assert list(made.values())[1:] == [5, 3], made  # after those of init() in the first world
    assert {number: made[number] for number in notes.made} == notes.made == made
"""
    succeeded(run_job(3, source))
