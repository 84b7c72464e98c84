"""`mpitrain resume JOB`: continue a job whose `mpitrain run` was lost."""

from __future__ import annotations

import argparse

from mpitrain.cli.changing import complete_by, job_id, kept_here
from mpitrain.cli.launching import add_inventory_argument

HELP = "continue a job whose `mpitrain run` was lost"
PAGE = "how-to/fault-tolerance.md"

_EPILOG = """\
The hosts of the job keep its state in memory for 15 min after the loss. The job
continues from there, with the command and in the folder that started it.
`mpitrain ps` lists these jobs; the id of any attempt will do.

Run this on a host of the job, or on another node of its cluster.

  mpitrain resume 1a2b3c4d
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_inventory_argument(parser)
    complete_by(parser.add_argument("job", type=job_id, help="the id of the job"), kept_here)


def run(arguments: argparse.Namespace) -> int:
    """Continue with the job. Return its exit code."""
    from mpitrain.launch.time_limit import note_early

    note_early()  # the other imports take a while
    from mpitrain.launch.resume import resume

    return resume(arguments.job, arguments.inventory)
