"""Ranks in several containers on one machine, which MPI takes for ranks of one node."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from faults.outcome import report_of, succeeded
from jobs import VENVS, Job, mpiexec, run_command

# A container as far as processes go. Each has a process 1; and here, the same numbers of files.
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
        "cannot map the memory of the ranks on its node: No such process",
        "--pid=host",
    )


def test_containers_that_share_their_processes() -> None:
    """As with --pid=host. (Without, MPICH's own way between ranks of a node, process_vm_readv, fails as well.)"""
    job = run(["unshare", "--mount", "--ipc"])
    succeeded(job)
    assert job.stdout == "summed up on 1 node\n"
