"""The first program of each rank: it sets the rank's own variables, reports its start, and becomes the user's program.

    python -m mpitrain.launch.rank '{"0-1": {"UCX_NET_DEVICES": "eno1"}, "2-3": {...}}' PROGRAM ARGUMENT...

The process stays the same, so mpiexec and MPI notice nothing. The settings are those that differ between hosts:
mpiexec gives all ranks the same environment. torchrun's variables for the place of a rank are set too (torchrun.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mpitrain.context import JobContext
from mpitrain.reading import json_of
from mpitrain.watching.roll_call import appear

# torchrun's variables for the place of a rank, each with those of mpiexec (MPICH and Intel MPI, Open MPI) and srun.
PLACE = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    "ROLE_RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


def place_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for the place of a rank, as far as the launcher's variables in `environ` say it."""
    told = {name: next((environ[mark] for mark in marks if mark in environ), None) for name, marks in PLACE.items()}
    return {name: value for name, value in told.items() if value is not None}


def settings_of(rank: int, settings: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return what `rank` adds to its environment."""
    for ranks, variables in settings.items():
        first, _, last = ranks.partition("-")
        if int(first) <= rank <= int(last):
            return variables
    return {}


def main(arguments: list[str]) -> None:
    """Become the program. Never returns."""
    text, *program = arguments
    number = next((os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), None)
    if number is not None:
        told = json_of(text, SystemExit, "mpitrain: what the launcher tells its ranks", any_text=True)
        added = {**place_of(os.environ), **settings_of(int(number), told)}
        os.environ.update(added)
        if roll_call := JobContext.read(os.environ).roll_call:
            try:
                appear(roll_call, int(number))
            except OSError as error:
                sys.exit(f"mpitrain: {error}")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
