"""What `mpitrain ps` says of a job with servers, on a machine where other tests run jobs too."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from commands import Command, contexts_of

from jobs import Job, run_command, until

COLUMNS = ["JOB", "SINCE", "STATE", "STEP", "METRICS", "RANKS", "SCRIPT"]


def ps(*arguments: str) -> Job:
    """Run `mpitrain ps` here. Without the id of a job, the exit code may be due to a job of another test."""
    return run_command([sys.executable, "-m", "mpitrain", "ps", "--hosts", "localhost", *arguments])


def line_of(command: Command) -> dict[str, str]:
    """What the list says of the job of this command; {} if it does not have it."""
    (token,) = tokens_of(command) or ("",)
    lines = [line for line in ps().stdout.splitlines() if line.startswith(f"{token} ")] if token else []
    return dict(zip(COLUMNS, re.split(r"  +", lines[0], maxsplit=6), strict=True)) if lines else {}


def line_with(command: Command, **columns: str) -> dict[str, str]:
    """Wait until the list has these patterns in these columns for the job of this command. Return the line.

    All of them at once: what the list reads was written up to a second earlier, or more on a busy machine.
    """
    found: dict[str, str] = {}

    def fits() -> bool:
        found.clear()
        found.update(line_of(command))
        return bool(found) and all(re.fullmatch(pattern, found[name]) for name, pattern in columns.items())

    until(fits, f"the list has no line of that job with {columns}")
    return found


def tokens_of(command: Command) -> set[str]:
    """The ids of the jobs below this command."""
    return {context.job for context in contexts_of(command).values()}


def table_in(job: Job, title: str = "WORKER") -> list[list[str]]:
    """The rows from the one with this title to the end of what `mpitrain ps JOB` has printed; [] without it."""
    lines = job.stdout.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith(f"{title} ")), len(lines))
    return [re.split(r"  +", row) for row in lines[begin:]]


def table_with(token: str, fits: Callable[[list[list[str]]], object]) -> tuple[Job, list[list[str]]]:
    """Wait until the table of workers of this job fits. Return what `mpitrain ps JOB` has printed, and the table."""
    found: list[tuple[Job, list[list[str]]]] = []

    def is_there() -> bool:
        job = ps(token)
        found[:] = [(job, table_in(job))]
        return bool(fits(found[0][1]))

    until(is_there, f"the table of job {token} does not come to that")
    return found[0]
