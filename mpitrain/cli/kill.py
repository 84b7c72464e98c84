"""`mpitrain kill JOB`: end a job on all its hosts, by its id."""

from __future__ import annotations

import argparse
import sys

from mpitrain.cli.changing import add_job_argument
from mpitrain.cli.ps import add_host_arguments

HELP = "end a job"
PAGE = "how-to/run-jobs.md"

_EPILOG = """\
The launcher of the job ends it as after Ctrl-C: the ranks have 5 s to end by
themselves. If the launcher is gone, or does not end the job within 12 s, the
processes of the job are killed. What is kept of a job whose launcher was lost
is dropped.

  mpitrain kill 1a2b3c4d
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_host_arguments(parser)
    add_job_argument(parser, "the id of the job")


def run(arguments: argparse.Namespace) -> int:
    """End the job. Return 0 if no process of it remains on any host, and no state of it is kept."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import end_job, find_all

    placement = place_ranks(arguments.hosts, arguments.inventory, None, 1)
    jobs, kept, wrong = find_all(placement)
    job = next((job for job in jobs if job.token == arguments.job), None)
    held = next((one for one in kept if arguments.job in one.estate["tries"]), None)
    if job is None and held is not None:
        _, wrong = end_job(placement, arguments.job)
        lines = []
        if held.is_lost:
            if there := [host for host in held.keepers if host not in wrong]:
                print(f"job {arguments.job}: its kept state was dropped on {', '.join(there)}")
        elif held.is_launched:  # it has no ranks now: it is about to start them
            print(f"job {arguments.job}: its launcher on {held.estate['own']} was told to end")
        else:
            lines.append(
                f"job {arguments.job}: its launcher is on {held.estate['own']}, which was not reached. Run `mpitrain "
                "kill` there"
            )
    elif job is not None:
        left, wrong = end_job(placement, arguments.job)
        lines = [
            f"{host}: process {line} could not be killed" for host, left_there in left.items() for line in left_there
        ]
        launcher = job.launcher.partition(" ")[0]
        if launcher and not job.is_launched and launcher not in placement.machines:
            lines.append(
                f"job {job.token}: its ranks have ended, but `mpitrain run` itself is on {launcher}, which was not "
                "reached. It may start them again. Run `mpitrain kill` there too"
            )
        if not lines and not wrong:
            print(f"job {job.token} has ended on {', '.join(job.num_processes)}")
    else:
        known = ", ".join(job.token for job in jobs) or "none"
        where = ", ".join(placement.machines)
        lines = [f"there is no job {arguments.job} of yours on {where}; running: {known}. `mpitrain ps` lists them"]
    for line in [*lines, *wrong.values()]:
        print(f"mpitrain kill: {line}", file=sys.stderr)
    return int(bool(lines or wrong))
