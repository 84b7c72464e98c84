"""`mpitrain plot`: plot the record of a run, which may still be running."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.reading import is_file

HELP = "plot the metrics of a run"
PAGE = "how-to/monitor.md"

_EPILOG = """\
plot reads DIRECTORY/metrics.jsonl, which mpitrain.writers.JsonLines(DIRECTORY) writes,
and makes DIRECTORY/metrics.png. The run may still be running.

  mpitrain plot runs/first
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="directory of the run, with metrics.jsonl")


def run(arguments: argparse.Namespace) -> int:
    """Draw the plot. Return the exit code."""
    from mpitrain.training.plot import MOST_TEXTS, plot
    from mpitrain.training.writers.json_lines import FILE, read_events, read_rows

    path = arguments.directory / FILE
    if not is_file(path):
        raise ConfigError(
            f"there is no {path}; name the directory that mpitrain.writers.JsonLines was given (--run of the examples)."
            " A loop without a Trainer makes it with mpitrain.record_loop(DIRECTORY)"
        )
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path} has no row yet")
    picture = path.with_suffix(".png")
    try:
        events = read_events(path)
        plot(picture, rows, str(arguments.directory), events)
    except OSError as error:
        raise MpitrainError(f"cannot write {picture}: {error}") from None
    print(f"{picture}: {len(rows)} rows, steps {rows[0]['step']:.0f} to {rows[-1]['step']:.0f}")
    if len(events) > MOST_TEXTS:
        print(f"{len(events)} events; the picture has the texts of the last {MOST_TEXTS}:")
        print("\n".join(f"  {event.line()}" for event in events))
    return 0
