"""`mpitrain top [JOB]`: what every rank of a running job does, in a terminal."""

from __future__ import annotations

import argparse
import socket
import sys
from typing import TYPE_CHECKING

from mpitrain.cli.changing import complete_by, ids_here
from mpitrain.cli.terminal_text import print_object

if TYPE_CHECKING:
    from mpitrain.launch.live_jobs import LiveJob

HELP = "show what every rank of a running job does"
PAGE = "how-to/monitor.md"

_EPILOG = """\
Run it on the machine where `mpitrain run` runs. The ranks that hold up the
others come first; `!` marks those that are stopped, stuck, failed or silent.
If stdout is not a terminal, top prints one look and ends.

  mpitrain top
  mpitrain top 1a2b3c4d
  mpitrain top 1a2b3c4d | cat

Keys: q ends; s, r, h sort by slowness, rank, host; arrows, PgUp and PgDn
scroll.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of text",
    )
    job = parser.add_argument("job", nargs="?", help="the id of a job; may be left out if only one runs here")
    complete_by(job, ids_here)


def run(arguments: argparse.Namespace) -> int:
    """Show the job until it ends or the user quits. Return 1 if no job is chosen."""
    from mpitrain.cli.top_screen import look_once, show
    from mpitrain.launch.live_jobs import find

    jobs, wrong = find()
    for line in wrong:
        print(f"mpitrain top: {line}", file=sys.stderr)
    chosen = [job for job in jobs if arguments.job is None or job.has_id(arguments.job)]
    if arguments.json:
        print_object({"jobs": [dict(job.answer) for job in chosen], "problems": wrong})
        return int(not chosen)
    if not chosen:
        return _none(arguments.job)
    if len(chosen) > 1:
        _list(chosen)
        return 1
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        look_once(chosen[0])
        return 0
    return show(chosen[0])


def _none(token: str | None) -> int:
    """Report that there is nothing to watch, and show what ps knows."""
    from mpitrain.cli import ps
    from mpitrain.cli.terminal_text import wrapped

    job = "no job of yours" if token is None else f"no job {token} of yours"
    text = (
        f"mpitrain top: {job} has its launcher on {socket.gethostname()}. A job is watched on the machine where "
        "`mpitrain run` runs; a job that plain mpiexec has started has no launcher, and its own output is all there "
        "is. What `mpitrain ps` knows:"
    )
    print(wrapped(text, sys.stderr), file=sys.stderr)
    ps.run(argparse.Namespace(job=token, hosts=None, inventory=None, json=False))
    return 1


def _list(jobs: list[LiveJob]) -> None:
    """Print the jobs from which the user can choose."""
    from mpitrain.cli.terminal_text import cut, wrapped
    from mpitrain.cli.top_screen import state_of
    from mpitrain.cli.workers_table import table

    rows = [("JOB", "STATE", "STEP", "RANKS", "SCRIPT")]
    for job in jobs:
        answer = job.answer
        step = max((entry["step"] for entry in answer["ranks"]), default=0)
        script = " ".join([answer["script"], *answer["arguments"]])
        rows.append((answer["job"] or "-", state_of(answer), str(step or "-"), str(len(answer["ranks"])), script))
    print(cut(table(rows, len(rows[0])), sys.stdout))
    text = "mpitrain top: several jobs run here. Choose one: mpitrain top JOB"
    print(wrapped(text, sys.stderr), file=sys.stderr)
