"""The id of a job on the command line."""

from __future__ import annotations

import argparse
import re

_ID = re.compile(r"[0-9a-f]{8}")


def job_id(text: str) -> str:
    """Return the id that `text` is; an option's or argument's `type`."""
    if not _ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the id of a job; an id has 8 characters, as 1a2b3c4d, and `mpitrain ps` shows it"
        )
    return text


def add_job_argument(parser: argparse.ArgumentParser, meaning: str, nargs: str | None = None) -> None:
    """Declare the argument `job`, which a shell can complete."""
    complete_by(parser.add_argument("job", nargs=nargs, type=job_id, help=meaning), ids_here)


def complete_by(action: argparse.Action, completer: object) -> None:
    """Let a shell complete an option's value by what `completer` returns, a function of argcomplete's form."""
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete reads it there


def ids_here(**_: object) -> dict[str, str]:
    """Return the ids of this user's jobs with processes on this machine, each with its script."""
    from mpitrain.launch.roster import jobs

    return {job["id"]: " ".join(job["script"]) for job in jobs()}


def kept_here(**_: object) -> dict[str, str]:
    """Return the ids of the jobs that are kept on this machine and have lost their launcher."""
    from mpitrain.launch.jobs import kept_jobs
    from mpitrain.launch.roster import kept

    lost = [one for one in kept_jobs({"": kept()}) if one.is_lost]
    return {one.token: " ".join(one.estate["request"]["program"]) for one in lost}
