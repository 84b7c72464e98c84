"""A rank fails before init() or at its end; a process that a rank starts is not a rank."""

from __future__ import annotations

import pytest

from faults.failing import START
from faults.outcome import failed, succeeded
from jobs import run_job

BEFORE = """
import os
import re
{imports}
if os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")) == "1":
    raise RuntimeError("before init")
mt.init().barrier()
"""


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (3, 5))])
def test_an_exception_before_init(ranks: int) -> None:
    job = run_job(ranks, BEFORE.format(imports="import mpitrain as mt"))
    failed(job, "RuntimeError: before init\n")
    assert job.stderr.count("Traceback") == 1, job.output


@pytest.mark.parametrize("first", ["import mpitrain as mt", "import mpitrain as mt\nfrom mpi4py import MPI"])
def test_an_exception_before_init_with_either_library(first: str, vendor: str) -> None:
    # In the second case MPI is already initialised, and the rank would wait in MPI_Finalize at its end.
    job = run_job(3, BEFORE.format(imports=first), launcher=vendor, python=vendor)
    failed(job, "RuntimeError: before init\n")


def test_an_exception_on_all_ranks_before_init(vendor: str) -> None:
    job = run_job(3, "import mpitrain\nraise RuntimeError('before init')", launcher=vendor, python=vendor)
    failed(job, "RuntimeError: before init\n")


def test_an_exception_in_an_atexit_handler_is_reported_and_ignored_as_python_does(vendor: str) -> None:
    source = START + "def bang(): raise RuntimeError('in atexit')\nif rank == 1: atexit.register(bang)"
    job = run_job(3, source, launcher=vendor, python=vendor)
    succeeded(job)
    assert "RuntimeError: in atexit" in job.stderr


def test_collective_calls_in_atexit_handlers() -> None:
    job = run_job(3, START + "atexit.register(lambda: sys.stdout.write(f'{world.mean(float(rank))}\\n'))")
    succeeded(job)
    assert sorted(job.stdout.split()) == ["1.0", "1.0", "1.0"], job.output


def test_a_rank_that_works_on_alone_is_waited_for(vendor: str) -> None:
    source = START + "if rank == 1:\n    time.sleep(3)\n    print('late', flush=True)"
    job = run_job(3, source, launcher=vendor, python=vendor)
    succeeded(job)
    assert job.stdout == "late\n", job.output


def test_a_forked_child_is_no_rank() -> None:
    source = (
        START
        + """
if rank == 0:
    child = os.fork()
    if child == 0:
        try:
            raise RuntimeError("in a child")
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
world.barrier()
"""
    )
    job = run_job(2, source)
    succeeded(job)
    assert "RuntimeError: in a child" in job.stderr
    assert "failed" not in job.stderr


@pytest.mark.parametrize("init", ["", "mt.init()"])
def test_a_helper_of_a_rank_is_no_rank(init: str) -> None:
    source = f"""
import subprocess, sys
import mpitrain as mt
{init}
helper = subprocess.run([sys.executable, "-c", "import mpitrain; raise RuntimeError('in a helper')"], check=False)
assert helper.returncode == 1, helper.returncode
mt.init().barrier()
"""
    job = run_job(2, source)
    succeeded(job)
    assert job.stderr.count("RuntimeError: in a helper\n") == 2, job.output


@pytest.mark.parametrize("start", ["subprocess.run([sys.executable, '-c', CHILD], check=True)", "os.system(LINE)"])
def test_a_program_that_a_rank_starts_is_alone(start: str, vendor: str) -> None:
    """It is no rank, with MPI and without mpitrain too; its parent goes on. MPI's own spawn is not affected."""
    source = f"""
import os, shlex, subprocess, sys
import mpitrain as mt
CHILD = "import mpitrain as mt; world = mt.init(); print('alone', world.rank, world.sum(1))"
BARE = "from mpi4py import MPI; print('bare', MPI.COMM_WORLD.size)"
LINE = shlex.join([sys.executable, "-c", CHILD])
world = mt.init()
{start}
subprocess.run([sys.executable, "-c", BARE], check=True)
assert world.sum(1) == 2
"""
    job = run_job(2, source, launcher=vendor, python=vendor)
    succeeded(job)
    # The lines of two processes may mix.
    assert sorted("".join(job.stdout.split())) == sorted(2 * "alone01bare1"), job.output
