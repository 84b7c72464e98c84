"""The vendor of an MPI library and of an mpiexec, and the launcher of a process, from real texts and variables."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from programs import program

from mpitrain.errors import LaunchError
from mpitrain.launch.launched import Launched, check_size, expected_sizes, launched_by
from mpitrain.launch.libraries import (
    Vendor,
    can_launch,
    describe_mpiexec,
    find_library,
    vendor_of_library,
    vendor_of_mpiexec_text,
)


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\n", "mpich"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", "openmpi"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "impi"),
        ("MVAPICH2 Version      :\t2.3.7\n", "other"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17", "other"),
    ],
)
def test_vendor_of_library(text: str, vendor: Vendor) -> None:
    assert vendor_of_library(text) == vendor


@pytest.mark.parametrize(
    ("text", "vendor", "version"),
    [
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich", "5.0.2"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/\n", "openmpi", "5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi", "4.1.4"),
        ("prterun (PRRTE) 3.0.7\n", "openmpi", "3.0.7"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626\n", "impi", "2021.18.1"),
        ("slurm 22.05.8\n", "other", ""),
    ],
)
def test_mpiexec_describes_itself(tmp_path: Path, text: str, vendor: Vendor, version: str) -> None:
    found = describe_mpiexec(program(tmp_path / "mpiexec", f"cat <<'END'\n{text}END"))
    assert (found.vendor, found.version) == (vendor, version)
    assert vendor_of_mpiexec_text(text) == vendor


def test_mpiexec_that_hangs_or_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"did not answer within 0\.1 s"):
        describe_mpiexec(program(tmp_path / "mpiexec", "exec sleep 60"), timeout_seconds=0.1)
    with pytest.raises(LaunchError, match="No such file"):
        describe_mpiexec(tmp_path / "none")


def test_the_library_of_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")  # is not taken for Python's
    monkeypatch.chdir(tmp_path)
    library = find_library(sys.executable)
    assert library.vendor == "mpich"
    assert re.fullmatch(r"MPICH \d[\w.]+", library.version)
    with pytest.raises(LaunchError, match="cannot load MPI library"):
        find_library(program(tmp_path / "python", "echo 'RuntimeError: cannot load MPI library' >&2\nexit 1"))


@pytest.mark.parametrize(
    ("mpiexec", "library", "can"),
    [
        ("mpich", "mpich", True),
        ("mpich", "impi", True),
        ("impi", "mpich", True),
        ("openmpi", "openmpi", True),
        ("openmpi", "mpich", False),
        ("impi", "openmpi", False),
        ("other", "mpich", True),
        ("mpich", "other", True),
    ],
)
def test_can_launch(mpiexec: Vendor, library: Vendor, can: bool) -> None:
    assert can_launch(mpiexec, library) is can


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
