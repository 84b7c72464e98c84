"""Processes that a launcher started as one job and that MPI takes for several: the error has the right command."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import failed, report_of, succeeded
from jobs import REPOSITORY, VENVS, run_command, run_job

SIZE = "import mpitrain as mt; print('a world of', mt.init().size)"


def test_open_mpi_under_the_mpiexec_of_mpich() -> None:
    job = run_job(3, SIZE, launcher="mpich", python=need("openmpi"))
    failed(
        job,
        "LaunchError: process ",
        "mpiexec of MPICH started 3 processes (PMI_SIZE=3), but mpi4py loads Open MPI, which sees 1",
        "this would run as 3 jobs of 1. Start the program with the mpiexec of Open MPI",
        "    mpitrain run -n 3 SCRIPT\n",
    )
    assert "a world of" not in job.stdout


def test_mpich_under_the_mpiexec_of_open_mpi() -> None:
    job = run_job(3, SIZE, launcher=need("openmpi"), python="mpich")
    failed(
        job,
        "LaunchError: process ",
        "mpiexec of Open MPI started 3 processes (OMPI_COMM_WORLD_SIZE=3), but mpi4py loads MPICH, which sees 1",
        "this would run as 3 jobs of 1. Start the program with the mpiexec of MPICH",
        "    mpitrain run -n 3 SCRIPT\n",
    )
    assert "a world of" not in job.stdout


def test_mpi_that_the_script_has_initialised_by_itself() -> None:
    job = run_job(2, "from mpi4py import MPI\n" + SIZE, launcher="mpich", python=need("openmpi"))
    failed(job, "mpiexec of MPICH started 2 processes (PMI_SIZE=2), but mpi4py loads Open MPI, which sees 1")


@pytest.mark.parametrize(
    ("expected", "jobs"),
    [(4, ": this would run as 2 jobs of 2"), (3, "")],
)
def test_fewer_ranks_than_mpitrain_run_announced(expected: int, jobs: str) -> None:
    job = run_job(2, SIZE, env={"_MPITRAIN_EXPECTED_SIZE": str(expected)})
    report_of(
        job,
        f"mpitrain run started {expected} processes (_MPITRAIN_EXPECTED_SIZE={expected}), but mpi4py loads MPICH, "
        f"which sees 2{jobs}. Start the program with the mpiexec of MPICH",
        f"    mpitrain run -n {expected} SCRIPT\n",
    )
    assert job.stderr.count("LaunchError") == 1, job.output


def test_one_rank_alone_was_announced_more() -> None:
    job = run_job(
        3, "import os\nif os.environ['PMI_RANK'] == '2': os.environ['_MPITRAIN_EXPECTED_SIZE'] = '6'\n" + SIZE
    )
    report_of(
        job, "LaunchError: process 2 on ", "_MPITRAIN_EXPECTED_SIZE=6", "which sees 3: this would run as 2 jobs of 3"
    )
    assert job.stderr.count("LaunchError") == 1, job.output


@pytest.mark.parametrize("python", ["mpich", "openmpi"])
def test_a_slurm_step_whose_processes_mpi_does_not_join(python: str) -> None:
    # Simulates what srun sets for task 1 of 2. No launcher helps the process to find the other task.
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    job = run_job(None, SIZE, env=step, python=need(python))
    name = {"mpich": "MPICH", "openmpi": "Open MPI"}[python]
    failed(
        job,
        f"srun started 2 processes (SLURM_NTASKS=2), but mpi4py loads {name}, which sees 1",
        f"this would run as 2 jobs of 1. Start the program with the mpiexec of {name}",
        "    mpitrain run -n 2 SCRIPT\n",
    )


# The batch script is a "step" of its own, with a number from 2^32 - 6 upwards (slurm.h).
@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": str(2**32 - 5)}])
def test_a_slurm_batch_script_is_no_step(step: dict[str, str]) -> None:
    job = run_job(None, SIZE, env={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"} | step)
    succeeded(job)
    assert job.stdout == "a world of 1\n"


def packages(folder: Path, *names: str) -> dict[str, str]:
    """The environment of a Python that has only these packages. Start that Python with -S."""
    site = Path(pytest.__file__).parents[1]
    for name in names:
        (folder / name).symlink_to(site / name)
    return {"PYTHONPATH": f"{REPOSITORY}:{folder}"}


OURS = ("numpy", "numpy.libs", "ml_dtypes", "threadpoolctl.py")


def test_no_mpi_library(tmp_path: Path) -> None:
    env = packages(tmp_path, *OURS, "mpi4py") | {"LD_LIBRARY_PATH": ""}
    # No library came with these packages, so only the machine's own can be found.
    probe = run_command(
        [str(VENVS["mpich"] / "bin/python"), "-S", "-c", "import ctypes; ctypes.CDLL('libmpi.so.12')"], env=env
    )
    if probe.code == 0:
        pytest.skip("this machine has an MPI library of its own")
    job = run_command([str(VENVS["mpich"] / "bin/python"), "-S", "-c", SIZE], env=env)
    failed(
        job,
        "LaunchError: on ",
        "no MPI library can be loaded (cannot load MPI library",
        "libmpi.so.12: cannot open shared object file",
        "pip install mpi4py mpich",
    )


def test_an_mpi_library_that_is_not_where_it_should_be() -> None:
    job = run_job(2, SIZE, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    failed(
        job,
        "no MPI library can be loaded (cannot load MPI library",
        "/nowhere/libmpi.so: cannot open shared object file",
        "pip install mpi4py mpich",
    )


def test_no_mpi4py(tmp_path: Path) -> None:
    job = run_command([str(VENVS["mpich"] / "bin/python"), "-S", "-c", SIZE], env=packages(tmp_path, *OURS))
    failed(job, "LaunchError: on ", "(No module named 'mpi4py')", "pip install mpi4py mpich")
