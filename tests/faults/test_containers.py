"""Ranks in several containers on one machine: MPI takes them for ranks of one node."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from faults.outcome import report_of, succeeded
from jobs import VENVS, Job, mpiexec, run_command

# A container as far as processes go. Each has a process 1, and here the files of the containers have equal numbers.
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
SOURCE = """
import os
import numpy
import mpitrain as mt

world = mt.init()
while os.dup(0) < 100:
    pass
total = world.sum(numpy.full(100_000, 10.0**world.rank))
assert (total == 11).all(), total
world.print("summed up on", world.num_nodes, "node")
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")


def run(container: Sequence[str]) -> Job:
    return run_command([*mpiexec(2), *container, str(VENVS["mpich"] / "bin/python"), "-c", SOURCE])


def test_memory_of_another_container_is_not_taken_for_that_of_a_rank() -> None:
    report_of(
        run(CONTAINER),
        "LaunchError: rank 0 on ",
        "are in different containers on one machine, but MPI takes them for ranks of one node",
        "--pid=host",
    )


def test_containers_that_share_their_processes() -> None:
    """As with --pid=host. (Without that option, process_vm_readv fails, which MPICH uses between ranks of a node.)"""
    job = run(["unshare", "--mount", "--ipc"])
    succeeded(job)
    assert job.stdout == "summed up on 1 node\n"


def test_machines_of_different_names_are_nodes() -> None:
    """Host name, boot and numbering of processes identify a node, whatever MPI says. Here MPI says one node."""
    script = 'hostname node$((${PMI_RANK:-0} / 2)); exec "$@"'
    source = """
import mpitrain as mt

world = mt.init()
assert world.node_ranks == (0, 0, 1), world.node_ranks
assert (world.local_rank, world.local_size) == ((0, 2), (1, 2), (0, 1))[world.rank]
assert world.sum(10**world.rank) == 111
world.print(world.hosts)
"""
    python = str(VENVS["mpich"] / "bin/python")
    job = run_command([*mpiexec(3), "unshare", "--uts", "sh", "-c", script, "sh", python, "-c", source])
    succeeded(job)
    assert job.stdout == "('node0', 'node0', 'node1')\n"
