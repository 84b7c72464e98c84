"""Common code of `mpitrain join` and `mpitrain leave`: they send a wish to a job's launcher and print its answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from mpitrain.cli.job_id import job_id
from mpitrain.cli.launching import add_inventory_argument


def add_job_arguments(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Declare the job and its hosts; `meaning` is that of --hosts."""
    parser.add_argument("job", type=job_id, help="the id of the job, which `mpitrain ps` shows")
    parser.add_argument("--hosts", metavar="A,B", required=True, help=meaning)
    add_inventory_argument(parser)


def change(arguments: argparse.Namespace, wish: Mapping[str, Any]) -> int:
    """Tell the job the wish (launch/wishes.py), and print its answer; returns 0 if the job accepts."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import change_hosts

    placement = place_ranks(None, arguments.inventory, None, 1)
    answer, wrong = change_hosts(placement, arguments.job, wish)
    if "accepted" in answer:
        print(f"job {arguments.job}: {answer['accepted']}")
        return 0
    lines = [f"job {arguments.job}: {answer['refused']}"] if answer else list(wrong.values())
    if not answer:
        where = ", ".join(placement.machines)
        lines.append(f"no launcher of a job {arguments.job} of yours is on {where}. `mpitrain ps` lists the jobs")
    for line in lines:
        print(f"mpitrain {arguments.command}: {line}", file=sys.stderr)
    return 1
