"""`mpitrain bench`: measure collectives on any set of ranks; starts them as `mpitrain run` does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from mpitrain.cli.launching import add_launch_arguments, request_of
from mpitrain.errors import ConfigError
from mpitrain.forecast.bench_options import add_arguments as add_bench_arguments
from mpitrain.forecast.bench_options import read_options, words_of

HELP = "measure collectives, between hosts or on one, beside MPI's own"

PAGE = "how-to/performance.md"

_EPILOG = """\
The columns are those of nccl-tests. Every result is checked; the exit code is 1 if
an element is #wrong.

  mpitrain bench -n 2 --sizes 4K,1M --algorithms all
  mpitrain bench --hosts node1,node2 --ppn 1 --link 1Gbit/s --plot r.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain bench [OPTION]..."
    parser.epilog = _EPILOG
    add_launch_arguments(parser)
    # Without this line, argparse would take -m for an abbreviation of another launcher's -machinefile.
    parser.add_argument("-m", dest="module", help=argparse.SUPPRESS)
    add_bench_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the options and start the ranks. Return the exit code."""
    from mpitrain.launch.start import start

    if arguments.module is not None:
        raise ConfigError(f"bench runs no module; to run one: mpitrain run -n N -m {arguments.module}")
    read_options(arguments)  # before any rank starts
    arguments.progress |= sys.stdout.isatty()  # the ranks write into pipes
    words = words_of(arguments)
    # -P: the working folder may have a json.py that is not Python's.
    module = ["-P", "-m", "mpitrain.forecast.bench"]
    file = Path(__file__).parents[1] / "forecast/bench.py"  # every host must have it
    request = request_of(arguments, [*module, *words], str(file), [arguments.command, *words])
    return start(replace(request, shows_ranks=False))
