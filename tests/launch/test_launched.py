"""The launcher of a process, recognised from variables as real launchers set them."""

from __future__ import annotations

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.launched import Launched, check_size, expected_sizes, launched_by

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("environ", "launched"),
    [
        ({}, None),
        ({"PATH": "/bin", "I_MPI_ROOT": "/opt"}, None),
        (OPEN_MPI, Launched("mpiexec of Open MPI", "openmpi", 4, 3, "OMPI_COMM_WORLD_SIZE")),
        (HYDRA, Launched("mpiexec of MPICH", "mpich-like", 2, 1, "PMI_SIZE")),
        (HYDRA | {"I_MPI_HYDRA_UUID": "x"}, Launched("mpiexec of Intel MPI", "mpich-like", 2, 1, "PMI_SIZE")),
        (STEP, Launched("srun", None, 8, 5, "SLURM_NTASKS")),
        (STEP | {"SLURM_STEP_NUM_TASKS": "3"}, Launched("srun", None, 3, 5, "SLURM_STEP_NUM_TASKS")),
        # In an allocation mpiexec starts its daemons as a step with one task per node.
        (STEP | HYDRA, Launched("mpiexec of MPICH", "mpich-like", 2, 1, "PMI_SIZE")),
        # What srun --mpi=pmi2 of Slurm 22.05 sets.
        (STEP | {"PMI_SIZE": "8", "PMI_RANK": "5"}, Launched("srun", "mpich-like", 8, 5, "PMI_SIZE")),
        # The batch script and an interactive shell are not steps of the user.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        (STEP | {"SLURM_STEP_ID": "4294967291"}, None),
        (STEP | {"SLURM_STEP_ID": "4294967290"}, None),
        ({"_MPITRAIN_EXPECTED_SIZE": "4"}, Launched("mpitrain run", None, 4, None, "_MPITRAIN_EXPECTED_SIZE")),
        (HYDRA | {"_MPITRAIN_EXPECTED_SIZE": "4"}, Launched("mpiexec of MPICH", "mpich-like", 2, 1, "PMI_SIZE")),
    ],
)
def test_launched_by(environ: dict[str, str], launched: Launched | None) -> None:
    assert launched_by(environ) == launched


def test_every_announced_size_is_compared() -> None:
    sizes = expected_sizes(HYDRA | {"_MPITRAIN_EXPECTED_SIZE": "4"})
    assert sizes == {"PMI_SIZE": 2, "_MPITRAIN_EXPECTED_SIZE": 4}
    assert expected_sizes({}) == {}


def test_a_size_that_is_no_number() -> None:
    with pytest.raises(LaunchError, match="PMI_SIZE is 'two'"):
        launched_by({"PMI_SIZE": "two"})


@pytest.mark.parametrize(
    ("library", "kind"), [("Open MPI v5.0.11", "pmix"), ("MPICH Version: 5.0.2", "pmi2"), ("Intel(R) MPI", "pmi2")]
)
def test_srun_has_a_way_for_each_library(library: str, kind: str) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    with pytest.raises(LaunchError, match=f"or let srun join them, where Slurm has the plugin: --mpi={kind}$"):
        check_size(library, step, 1)
    with pytest.raises(LaunchError) as caught:
        check_size(library, {"PMI_SIZE": "4"}, 1)
    assert "srun" not in str(caught.value)
    with pytest.raises(LaunchError, match=r"srun started 4 processes \(PMI_SIZE=4\)") as caught:
        check_size(library, step | {"PMI_SIZE": "4"}, 1)
    assert str(caught.value).endswith("--mpi=pmix" if kind == "pmix" else "SCRIPT")  # pmi2 was tried
