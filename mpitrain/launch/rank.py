"""The first program of each rank of a job over several hosts: it reports its start, and becomes the user's program.

    python -m mpitrain.launch.rank '{"0-1": {"UCX_NET_DEVICES": "eno1"}, "2-3": {...}}' PROGRAM ARGUMENT...

The process stays the same, so mpiexec and MPI notice nothing. The settings are those that differ between hosts:
mpiexec gives all ranks the same environment.
"""

from __future__ import annotations

import os
import sys

from mpitrain.context import JobContext
from mpitrain.reading import json_of
from mpitrain.watching.roll_call import appear


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
        os.environ.update(settings_of(int(number), told))
        if roll_call := JobContext.read(os.environ).roll_call:
            try:
                appear(roll_call, int(number))
            except OSError as error:
                sys.exit(f"mpitrain: {error}")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
