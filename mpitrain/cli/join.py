"""`mpitrain join JOB --hosts d`: more hosts for a running job."""

from __future__ import annotations

import argparse

from mpitrain.cli.changing import add_job_arguments, change

HELP = "let hosts join a running job"
PAGE = "how-to/fault-tolerance.md"

_EPILOG = """\
The hosts are compared with the others, as at a start. After the next copy of
its state in memory, the job continues with them, from the same step. A host
without devices gets as many ranks as the largest number on a host of the job.

Run this on a node of the cluster, or where `mpitrain run` runs.

  mpitrain join 1a2b3c4d --hosts node3
  mpitrain join 1a2b3c4d --hosts node3/cuda:0-1,node4/cuda:0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_job_arguments(parser, "the hosts that join, with or without devices")


def run(arguments: argparse.Namespace) -> int:
    """Wish it; returns 0 if the job accepts."""
    from mpitrain.launch.placement import parse_hosts

    parse_hosts(arguments.hosts)
    return change(arguments, {"join": arguments.hosts})
