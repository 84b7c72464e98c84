"""`mpitrain leave JOB --hosts b`: fewer hosts for a running job."""

from __future__ import annotations

import argparse

from mpitrain.cli.changing import add_job_arguments, change

HELP = "let hosts leave a running job"
PAGE = "how-to/fault-tolerance.md"

_EPILOG = """\
After the next copy of its state in memory, the job continues without these hosts,
from the same step. At least --min-nodes hosts must be left.

Run this on a node of the cluster, or where `mpitrain run` runs.

  mpitrain leave 1a2b3c4d --hosts node3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_job_arguments(parser, "the hosts that leave")


def run(arguments: argparse.Namespace) -> int:
    """Wish it; returns 0 if the job accepts."""
    from mpitrain.errors import ConfigError
    from mpitrain.launch.placement import parse_hosts

    by_host = parse_hosts(arguments.hosts)
    if any(by_host.values()):
        raise ConfigError(
            f"--hosts {arguments.hosts} names devices or numbers of ranks, but only a whole host can leave; name "
            "hosts alone"
        )
    return change(arguments, {"leave": list(by_host)})
