"""`mpitrain ps`: list this user's jobs of `mpitrain run`."""

from __future__ import annotations

import argparse
import sys
import time

from mpitrain.cli.launching import add_inventory_argument

HELP = "list the jobs that are running, and those that can be resumed"

_EPILOG = """\
If this machine is a node of a cluster, ps looks on all hosts of the cluster,
otherwise only on this machine. Give the id of a job to `mpitrain kill ID`, or
that of a kept one to `mpitrain run --resume ID`.

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
    from mpitrain.launch.jobs import find_all

    placement = place_ranks(arguments.hosts, arguments.inventory, None, 1)
    jobs, kept, wrong = find_all(placement)
    hosts = placement.machines
    rows = [("JOB", "SINCE", "STATE", "STEP", "METRICS", "RANKS", "SCRIPT")]
    rows += [
        (job.token, _time(job.since), job.state(hosts), job.step(), job.metrics(), job.where(), job.script)
        for job in jobs
    ]
    running = {job.token for job in jobs}
    for one in kept:
        if one.is_lost and running.isdisjoint(one.estate["tries"]):
            until = time.strftime("%H:%M:%S", time.localtime(one.until_ms / 1000))
            state = f"kept until {until}: mpitrain run --resume {one.token}"
            where = f"none, its state on {', '.join(one.keepers)}"
            since, script = _time(one.estate["since"]), " ".join(one.estate["request"]["program"])
            rows.append((one.token, since, state, str(one.step or "-"), "-", where, script))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    if len(rows) > 1:
        for row in rows:
            print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]))
    elif not wrong:
        print(f"no job of yours is running on {', '.join(hosts)}")
    for line in wrong.values():
        print(f"mpitrain ps: {line}", file=sys.stderr)
    return int(bool(wrong))


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
