"""A job whose ranks the agents of the hosts have started (`mpitrain run --starter agent`): there is no MPI among them.

MPI would take each rank for a job of one, and say nothing. So what asks for it is refused: init(), and the import of
mpi4py.MPI. A library that can do without mpi4py takes this ImportError as if it were not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from mpitrain.context import EXPECTED_SIZE, RANK


def why_no_mpi(environ: Mapping[str, str]) -> str:
    """Return why MPI does not join this process to others; "": no agent has started it, or it is alone."""
    if RANK not in environ or environ.get(EXPECTED_SIZE, "1") == "1":
        return ""
    return (
        f"rank {environ[RANK]} on {os.uname().nodename} asks for MPI, and mpitrain run has started the ranks without "
        "it. Start them with MPI: mpitrain run --starter mpiexec ..."
    )


def begin() -> None:
    """From now on, refuse the import of mpi4py.MPI in this process, if it is such a rank."""
    if why := why_no_mpi(os.environ):
        sys.meta_path.insert(0, _MpiRefused(why))


class _MpiRefused(MetaPathFinder):
    def __init__(self, why: str) -> None:
        self._why = why

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname == "mpi4py.MPI":
            raise ImportError(self._why, name=fullname)
        return None
