"""`mpitrain runs`: list the runs that have left a record, with how they ended and their best evaluation."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from mpitrain.cli.terminal_text import cut, print_object, printable
from mpitrain.cli.workers_table import table
from mpitrain.errors import ConfigError, MpitrainError

HELP = "list runs and their results"
PAGE = "how-to/monitor.md"

_EPILOG = """\
runs looks for records of runs (mpitrain.writers.JsonLines) in the folders and below
them, the youngest first. `mpitrain plot` draws the folders that it lists.

  mpitrain runs
  mpitrain runs runs /share/me/runs --last 100
"""
_FOLDER = Path("runs")
_INDENT = 10  # of why a run has failed, below its line
_NUM_WORDS = 7  # columns, all flush left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from mpitrain.cli.launching import positive

    parser.epilog = _EPILOG
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="where records are (runs)")
    parser.add_argument("--last", type=positive, default=20, metavar="N", help="list the N youngest runs (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per run, and why it has failed. Return 1 if there is none."""
    folders: Sequence[Path] = arguments.folders or [_FOLDER]
    for folder in arguments.folders:
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder}; name the folders that mpitrain.writers.JsonLines was given"
            )
    runs = _runs(folders)
    if arguments.json:
        print_object({"runs": runs[: arguments.last], "num_runs": len(runs)})
        return int(not runs)
    if not runs:
        print(f"mpitrain runs: there is no record of a run in {', '.join(map(str, folders))}", file=sys.stderr)
        return 1
    print(cut(_lines(runs[: arguments.last]), sys.stdout))
    if len(runs) > arguments.last:
        print(f"{arguments.last} of {len(runs)} runs; --last {len(runs)} lists all")
    return 0


def _runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The dashboard's data of each run, newest first. Both cache what they read in one index."""
    from mpitrain.dashboard.index import RunIndex, index_path
    from mpitrain.dashboard.record_reader import find_records, run_id
    from mpitrain.dashboard.summary import summary_of_run

    try:
        index = RunIndex(index_path())
        try:
            found = []
            for folder in find_records([folder.absolute() for folder in folders]):
                index.update(folder)
                found.append(index.run(run_id(folder)))
        finally:
            index.close()
    except (OSError, sqlite3.Error) as error:
        raise MpitrainError(f"the index {index_path()} cannot be used: {error}. Set XDG_CACHE_HOME") from None
    runs = [summary_of_run(one, None) for one in found if one is not None]
    return sorted(runs, key=lambda one: -(one["started"] or one["changed"]))


def _lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("JOB", "STATE", "STEP", "TOOK", "BEST", "FOLDER", "SCRIPT"), *map(_row, runs)]
    head, *lines = table(rows, _NUM_WORDS)
    listed = [head]
    for line, one in zip(lines, runs, strict=True):
        listed.append(line)
        if one["state"] in ("failed", "lost"):
            listed.append(" " * _INDENT + printable(one["why"]))
    return listed


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    step, steps = one["last"].get("step"), one["steps"]
    at = "-" if step is None else f"{step:,.0f}" + (f" / {steps:,}" if steps else "")
    until = one["ended"] or (time.time() if one["state"] == "trains" else one["changed"])
    took = "-" if one["started"] is None else str(timedelta(seconds=max(0, round(until - one["started"]))))
    best = one["best"]
    shown = f"{printable(best['name'])} {best['value']:.4g}" if best else "-"
    folder = os.path.relpath(one["folder"])
    folder = one["folder"] if folder.startswith("..") else folder
    return (one["job"] or "-", one["state"], at, took, shown, printable(folder), printable(one["script"]) or "-")
