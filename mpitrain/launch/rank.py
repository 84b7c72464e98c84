"""The first program of each rank: it sets the rank's own variables, reports its start, and becomes the user's program.

    python -m mpitrain.launch.rank '{"0-1": {"UCX_NET_DEVICES": "eno1"}, "2-3": {...}}' PROGRAM ARGUMENT...

The process stays the same, so mpiexec and MPI notice nothing. The settings are those that differ between hosts:
mpiexec gives all ranks the same environment. torchrun's variables for the place of a rank are set too (torchrun.py).
A rank that a warm interpreter has forked (mpitrain.job.warm) does the same without this program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from mpitrain.context import RANK_VARIABLES, TF_WORKERS, JobContext, tf_config
from mpitrain.error_file import ERROR_FILE
from mpitrain.reading import json_of
from mpitrain.watching.roll_call import appear

# On PYTHONPATH, it lets Python begin a rank, or a warm interpreter, with mpitrain/job/warm_start/sitecustomize.py.
HOOK = str(Path(__file__).parents[1] / "job" / "warm_start")
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


def command_of(settings: str, program: Sequence[str]) -> list[str]:
    """Return the words that start a rank. `settings` are by ranks, as JSON; `program` is the user's."""
    # -P: the working folder may have a json.py other than Python's.
    return [sys.executable, "-P", "-m", "mpitrain.launch.rank", settings, *program]


def split(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the settings and the program of such words."""
    return command[4], command[5:]


def settings_of(rank: int, settings: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return what `rank` adds to its environment."""
    for ranks, variables in settings.items():
        first, _, last = ranks.partition("-")
        if int(first) <= rank <= int(last):
            return variables
    return {}


def add_settings(environ: MutableMapping[str, str], settings: str) -> None:
    """Add what the rank of this environment has besides; nothing if mpiexec has not made it a rank."""
    number = rank_in(environ)
    if number is not None:
        told = json_of(settings, SystemExit, "mpitrain: what the launcher tells its ranks", any_text=True)
        environ.update({**place_of(environ), **settings_of(number, told)})
        if TF_WORKERS in environ:
            environ["TF_CONFIG"] = tf_config(environ[TF_WORKERS], number)


def report_start(starter: int = 0) -> None:
    """Tell the agent that this rank has started. `starter` is as in roll_call.appear.

    The rank gets an error file, as torchrun gives it one. It is memory that the agent holds too: it needs no folder on
    this host, and nothing of it is left.
    """
    number, roll_call = rank_in(os.environ), JobContext.read(os.environ).roll_call
    if number is not None and roll_call:
        errors = os.memfd_create("mpitrain-errors", 0)  # the program inherits it
        os.environ[ERROR_FILE] = f"/proc/{os.getpid()}/fd/{errors}"
        try:
            appear(roll_call, number, starter=starter, errors=errors)
        except OSError as error:
            sys.exit(f"mpitrain: {error}")


def rank_in(environ: Mapping[str, str]) -> int | None:
    """Return the rank that mpiexec has given to a process with this environment; None: it is none."""
    return next((int(environ[name]) for name in RANK_VARIABLES if name in environ), None)


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, such that Python begins with the hook."""
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": HOOK if not path else f"{HOOK}{os.pathsep}{path}"}


def main(arguments: list[str]) -> None:
    """Become the program. Never returns."""
    settings, *program = arguments
    add_settings(os.environ, settings)
    report_start()
    os.environ.update(hooked(os.environ))
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
