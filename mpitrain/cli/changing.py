"""Common code of `mpitrain join`, `leave` and `tell`: they send a wish to a job's launcher and print its answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.cli.job_id import add_job_argument
from mpitrain.cli.launching import add_inventory_argument
from mpitrain.cli.terminal_text import wrapped


def add_job_arguments(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Declare the job and its hosts; `meaning` is that of --hosts."""
    add_job_argument(parser, "the id of the job, which `mpitrain ps` shows")
    parser.add_argument("--hosts", metavar="A,B", required=True, help=meaning)
    add_inventory_argument(parser)


def change(arguments: argparse.Namespace, wish: Mapping[str, Any]) -> int:
    """Tell the job the wish (launch/wishes.py), and print its answer; returns 0 if the job accepts."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import tell_launcher

    placement = place_ranks(None, arguments.inventory, None, 1)
    answer, wrong = tell_launcher(placement, arguments.job, wish)
    return show_answer(arguments.command, arguments.job, placement.machines, answer, wrong)


def show_answer(
    command: str, job: str, machines: Sequence[str], answer: Mapping[str, Any], wrong: Mapping[str, str]
) -> int:
    """Print what the launcher of a job has answered; returns 0 if it has accepted."""
    if "accepted" in answer:
        print(wrapped(f"job {job}: {answer['accepted']}", sys.stdout))
        return 0
    lines = [f"job {job}: {answer['refused']}"] if answer else list(wrong.values())
    if not answer:
        where = ", ".join(machines)
        listed = "`mpitrain ps` lists the jobs; one under plain mpiexec has no launcher"
        lines.append(f"no launcher of a job {job} of yours is on {where}. {listed}")
    for line in lines:
        print(wrapped(f"mpitrain {command}: {line}", sys.stderr), file=sys.stderr)
    return 1
