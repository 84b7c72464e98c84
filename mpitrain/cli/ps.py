"""`mpitrain ps`: list this user's running jobs of `mpitrain run`."""

from __future__ import annotations

import argparse
import sys
import time

from mpitrain.cli.launching import add_inventory_argument

HELP = "list the jobs that are running"

_EPILOG = """\
If this machine is a node of a cluster, ps looks on all hosts of the cluster,
otherwise only on this machine. Give the id of a job to `mpitrain kill ID`.

  mpitrain ps
  mpitrain ps --hosts node1,node2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_host_arguments(parser)


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say where to look."""
    parser.add_argument("--hosts", metavar="A,B", help="hosts to look on; localhost for this machine")
    add_inventory_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line per job. Return 1 if a host could not be asked."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import find_jobs

    placement = place_ranks(arguments.hosts, arguments.inventory, None, 1)
    jobs, wrong = find_jobs(placement)
    hosts = placement.machines
    rows = [("JOB", "SINCE", "STATE", "STEP", "METRICS", "RANKS", "SCRIPT")]
    for job in jobs:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.since))
        rows.append((job.token, since, job.state(hosts), job.step(), job.metrics(), job.where(), job.script))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    if jobs:
        for row in rows:
            print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]))
    elif not wrong:
        print(f"no job of yours is running on {', '.join(hosts)}")
    for line in wrong.values():
        print(f"mpitrain ps: {line}", file=sys.stderr)
    return int(bool(wrong))
