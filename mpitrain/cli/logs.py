"""`mpitrain logs [JOB]`: the output of a job, while it runs and after its end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.cli.changing import add_job_argument
from mpitrain.errors import ConfigError, DataError
from mpitrain.reading import shown, whole

HELP = "show what a job prints or has printed"
PAGE = "how-to/run-jobs.md"

_EPILOG = """\
`mpitrain run` keeps the output of each job in ~/.local/state/mpitrain/logs, at
most 16 MiB of a job, and of the last 20 jobs. `mpitrain run --log-dir DIR` keeps
all of it in DIR. Run this on the machine where `mpitrain run` runs or ran.

  mpitrain logs                       the newest job
  mpitrain logs 1a2b3c4d -f           until the job ends
  mpitrain logs 1a2b3c4d --rank 3     only what rank 3 prints
"""
_NAP_SECONDS = 0.2
_READ_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends, or Ctrl-C")
    parser.add_argument("--rank", type=_rank, metavar="R", help="only what rank R has printed")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="the folder of `mpitrain run --log-dir`")
    add_job_argument(parser, "the id of the job; without it, the newest", nargs="?")


def run(arguments: argparse.Namespace) -> int:
    """Print the log. Return 0, or 1 if there is none."""
    from mpitrain.launch.job_logs import OUTPUT, find_logs, logs_folder, rank_file, ranks_of

    folder = arguments.log_dir or logs_folder()
    try:
        found = find_logs(arguments.job, folder)
    except OSError as error:
        raise DataError(f"the logs in {folder} cannot be read: {error.strerror}") from None
    if found is None:
        raise DataError(_none(arguments.job, folder))
    path, about = found
    if arguments.rank is None:
        name = OUTPUT
    elif arguments.rank < about.get("num_ranks", 0):
        name = rank_file(arguments.rank)
    else:
        raise ConfigError(f"there is no rank {arguments.rank} in job {about['job']}; its ranks are {ranks_of(about)}")
    printed = _Printed(path / name)
    if not arguments.follow:
        if not printed.print_new():
            print(f"mpitrain logs: nothing was printed yet ({path / name})", file=sys.stderr)
        return 0
    try:
        print(f"mpitrain logs: {_follow(printed, path, about)}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"mpitrain logs: interrupted; job {about['job']} is as before", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _none(job: str | None, folder: Path) -> str:
    which = f"a job {job} of yours" if job else "a job of yours"
    return (
        f"there are no logs of {which} in {folder}. They are on the machine where `mpitrain run` runs or ran; name its "
        "--log-dir DIR, if it had one. Of the jobs that have ended, only the newest 20 have logs"
    )


def _follow(printed: _Printed, path: Path, about: Mapping[str, Any]) -> str:
    """Print new output until the job ends. Return how it has ended."""
    from mpitrain.launch.job_logs import is_here, read_about
    from mpitrain.launch.processes import launcher_pid

    printed.print_new()
    while True:
        about = read_about(path) or about
        is_lost = not about["ended"] and is_here(about) and launcher_pid(about["launcher"]) is None
        if is_lost:  # it may have ended in between
            about = read_about(path) or about
        printed.print_new()
        if about["ended"]:
            return f"job {about['job']}: {about['ended'].get('text', 'the job has ended')}"
        if is_lost:
            return (
                f"job {about['job']} has lost its launcher. `mpitrain ps` shows whether its state is kept; then "
                f"`mpitrain resume {about['job']}` continues it"
            )
        time.sleep(_NAP_SECONDS)


class _Printed:
    """A file that is printed completely, each part once. When it is full, it becomes NAME.1, and a new one begins
    (job_logs.py)."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, path.with_name(f"{path.name}.1")
        self._inode = self._position = 0  # of the last byte that was printed

    def print_new(self) -> bool:
        """Print new output, the first time also NAME.1. False: there was none."""
        sys.stdout.flush()
        is_new = False
        for path in (self._before, self._path):
            with suppress(FileNotFoundError), path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if path == self._before and self._inode not in (0, inode):
                    continue
                file.seek(self._position if inode == self._inode else 0)
                while data := file.read(_READ_BYTES):
                    sys.stdout.buffer.write(data)
                    is_new = True
                self._inode, self._position = inode, file.tell()
        sys.stdout.flush()
        return is_new


def _rank(text: str) -> int:
    number = whole(text, 0, 1 << 31)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not the number of a rank, such as 3")
    return number
