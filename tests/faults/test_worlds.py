"""Many worlds, one after the other, in one process: they leave nothing behind."""

from __future__ import annotations

import pytest

from faults.failing import nightly, run
from faults.outcome import succeeded

SOURCE = """
import os, sys, threading, time
from dataclasses import replace
from pathlib import Path
import numpy
from mpi4py import MPI
import mpitrain as mt
from mpitrain.cli.new_project.train import build
from mpitrain.job.worlds import make_world

world = mt.init()
count = [0, 0]  # communicators made, and given back: MPI itself calls these for each one that descends from `base`


def made(comm, key, value):
    count[0] += 1
    return value


def given_back(comm, key, value):
    count[1] += 1


base = MPI.COMM_WORLD.Dup()
base.Set_attr(MPI.Comm.Create_keyval(made, given_back), 0)


def new_world(number):
    # Between nodes a thread drives the exchange. Every other time the test pretends that there are two nodes.
    nodes = tuple(min(rank, number % 2) for rank in range(world.size))
    return make_world(base, parent=world).replaced(node_ranks=nodes)


def num_threads():
    # A thread that was joined leaves /proc a moment later.
    found = []
    while len(found) < 20 and threading.active_count() < (now := len(os.listdir("/proc/self/task"))):
        found.append(now)
        time.sleep(0.01)
    return min([len(os.listdir("/proc/self/task")), *found])


def held():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "communicators": count[0] - count[1],
        "threads": num_threads(),
        "shared": sum("memfd:" in line or "/dev/shm" in line for line in maps),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


here = new_world(0)
trainer = mt.Trainer(build, world=here)
seen = []
last = int(sys.argv[1])
for number in range(1, last + 1):
    there = new_world(number)
    trainer.rebuild(there)
    here.free()
    here = there
    trainer.step()
    seen.append(held())
# The two kinds of World hold different things: each is compared with its kind, when MPI has settled.
for first in (20, 21):
    found = seen[first], seen[first + 20], seen[last - 22 + first]
    assert found[0] == found[1] == found[2], found
assert seen[-1]["communicators"] == 5, seen[-1]
assert trainer.step_number == last
trainer.close()
here.free()
assert count == [(last + 1) * 5, (last + 1) * 5], count
assert held()["communicators"] == 0
world.print(last, "worlds", trainer.step_number)
"""


@pytest.mark.parametrize(
    ("ranks", "worlds"),
    # Three ranks cover the cases of two. What one world leaves behind shows after 60 worlds.
    [(3, 60), *nightly((2, 200), (3, 200))],
)
def test_many_worlds(ranks: int, worlds: int, vendor: str) -> None:
    job = run(ranks, SOURCE, vendor, str(worlds), timeout=120)
    succeeded(job)
    assert job.stdout == f"{worlds} worlds {worlds}\n", job.output
