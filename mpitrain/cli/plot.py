"""`mpitrain plot`: plot the record of a run, which may still be running, or compare those of several runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.reading import is_file

if TYPE_CHECKING:
    from mpitrain.training.plot import PlottedRun

HELP = "plot the metrics of a run, or compare several"
PAGE = "how-to/monitor.md"

_EPILOG = """\
plot reads DIRECTORY/metrics.jsonl, which mpitrain.writers.JsonLines(DIRECTORY) writes,
and makes DIRECTORY/metrics.png; of several runs, compare.png in this folder. The
runs may still be running.

  mpitrain plot runs/first
  mpitrain plot runs/* --metric loss --metric "test accuracy" -o losses.svg
"""
_COMPARED = Path("compare.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIRECTORY", help="directory of a run, with metrics.jsonl"
    )
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="draw only this metric; may be repeated"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the picture: a .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Draw the plot. Return the exit code."""
    from mpitrain.training.plot import FORMATS, MOST_TEXTS, metrics_of, plot
    from mpitrain.training.writers.json_lines import FILE

    directories: Sequence[Path] = arguments.directories
    is_one = len(directories) == 1
    picture = arguments.output or ((directories[0] / FILE).with_suffix(".png") if is_one else _COMPARED)
    if picture.suffix.lower() not in FORMATS:
        raise ConfigError(f"-o {picture}: allowed are files that end in {', '.join(FORMATS)}")
    runs = [_read(directory, name) for directory, name in zip(directories, _names(directories), strict=True)]
    known = metrics_of(row for run in runs for row in run.rows)
    if wrong := [name for name in arguments.metric if name not in known]:
        raise ConfigError(f"--metric {wrong[0]!r:.80} is in no row; recorded are {', '.join(known)}")
    title = str(directories[0]) if is_one else f"{len(runs)} runs"
    try:
        plot(picture, runs, title, arguments.metric)
    except OSError as error:
        raise MpitrainError(f"cannot write {picture}: {error}") from None
    steps = [row["step"] for run in runs for row in run.rows]
    what = f"{len(runs[0].rows)} rows" if is_one else title
    print(f"{picture}: {what}, steps {min(steps):.0f} to {max(steps):.0f}")
    events = runs[0].events if is_one else ()
    if len(events) > MOST_TEXTS:
        print(f"{len(events)} events; the picture has the texts of the last {MOST_TEXTS}:")
        print("\n".join(f"  {event.line()}" for event in events))
    return 0


def _read(directory: Path, name: str) -> PlottedRun:
    from mpitrain.training.plot import PlottedRun
    from mpitrain.training.writers.json_lines import FILE, read_events, read_rows

    path = directory / FILE
    if not is_file(path):
        raise ConfigError(
            f"there is no {path}; name the directory that mpitrain.writers.JsonLines was given (--run of the examples)."
            " A loop without a Trainer makes it with mpitrain.record_loop(DIRECTORY)"
        )
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path} has no row yet")
    return PlottedRun(name, rows, read_events(path))


def _names(directories: Sequence[Path]) -> list[str]:
    """Distinct names of the runs: their folders, without the common beginning."""
    if len(directories) == 1:
        return [str(directories[0])]
    common = os.path.commonpath([folder.absolute().parent for folder in directories])
    return [str(folder.absolute().relative_to(common)) for folder in directories]
