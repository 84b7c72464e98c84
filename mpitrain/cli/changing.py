"""Functions of commands that name a job, send a request to its launcher, and print the answer (`mpitrain scale`,
`tell`)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.cli.terminal_text import wrapped

_ID = re.compile(r"[0-9a-f]{8}")


def job_id(text: str) -> str:
    """Convert a text to the id of a job; the `type` of an option or argument."""
    if not _ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the id of a job; an id has 8 characters, as 1a2b3c4d, and `mpitrain ps` shows it"
        )
    return text


def add_job_argument(parser: argparse.ArgumentParser, meaning: str, nargs: str | None = None) -> None:
    """Declare the argument `job`, which a shell can complete."""
    complete_by(parser.add_argument("job", nargs=nargs, type=job_id, help=meaning), ids_here)


def complete_by(action: argparse.Action, completer: object) -> None:
    """Let a shell complete an option's value with the results of `completer`, a function of argcomplete's form."""
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete reads it there


def ids_here(**_: object) -> dict[str, str]:
    """Return the ids of this user's jobs with processes on this machine, each with its script."""
    from mpitrain.launch.roster import jobs

    return {job["id"]: " ".join(job["script"]) for job in jobs()}


def kept_here(**_: object) -> dict[str, str]:
    """Return the ids of the jobs that have lost their launcher and whose state is kept on this machine."""
    from mpitrain.launch.jobs import kept_jobs
    from mpitrain.launch.roster import kept

    lost = [one for one in kept_jobs({"": kept()}) if one.is_lost]
    return {one.token: " ".join(one.estate["request"]["program"]) for one in lost}


def change(arguments: argparse.Namespace, wish: Mapping[str, Any]) -> int:
    """Send the request (launch/control.py) to the job, and print its answer. Return 0 if the job accepts."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import tell_launcher

    placement = place_ranks(None, arguments.inventory, None, 1)
    answer, wrong = tell_launcher(placement, arguments.job, wish)
    return show_answer(arguments.command, arguments.job, placement.machines, answer, wrong)


def show_answer(
    command: str, job: str, machines: Sequence[str], answer: Mapping[str, Any], wrong: Mapping[str, str]
) -> int:
    """Print the answer of a job's launcher. Return 0 if it has accepted."""
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
