"""Refuse a half-launched job: n processes that a launcher started as one, and that MPI takes for n jobs of one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from mpitrain.errors import LaunchError
from mpitrain.launch.libraries import (
    EXPECTED_SIZE,
    VENDOR_NAMES,
    Launched,
    Vendor,
    can_launch,
    expected_sizes,
    launched_by,
    vendor_of_library,
)

# It finds the mpiexec that belongs to the library by itself.
_RIGHT_COMMAND = "mpitrain run -n {size} SCRIPT"


def check_vendor(library_version: str, environ: Mapping[str, str]) -> None:
    """Raise LaunchError where the launcher cannot start processes of this library. Before MPI_Init.

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
    """Raise LaunchError unless MPI sees as many processes as the launcher started. After MPI_Init.

    Args:
        library_version: the text of `MPI.Get_library_version()`.
        environ: the process's environment.
        size: the size of MPI_COMM_WORLD.
    """
    for variable, expected in expected_sizes(environ).items():
        if expected != size:
            launched = launched_by(environ)
            raise LaunchError(_message(launched, variable, expected, vendor_of_library(library_version), size))


def _message(launched: Launched | None, variable: str, expected: int, library: Vendor, size: int) -> str:
    rank = f"process {launched.rank}" if launched and launched.rank is not None else "a process"
    launcher = "mpitrain run" if variable == EXPECTED_SIZE else launched.launcher if launched else "the launcher"
    jobs = f": this would run as {expected // size} jobs of {size}" if expected % size == 0 else ""
    return (
        f"{rank} on {socket.gethostname()}: {launcher} started {expected} processes ({variable}={expected}), but "
        f"mpi4py loads {VENDOR_NAMES[library]}, which sees {size}{jobs}. "
        f"Start it with the mpiexec of {VENDOR_NAMES[library]}, or let mpitrain find that one:\n"
        f"    {_RIGHT_COMMAND.format(size=expected)}"
    )
