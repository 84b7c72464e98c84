"""`mpitrain verify`: check that a script computes the same on several ranks as on one."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.cli.launching import add_launch_arguments, add_script_arguments, request_of_script
from mpitrain.errors import ConfigError, DataError, MpitrainError

if TYPE_CHECKING:
    from mpitrain.launch.start import Request

HELP = "run a script on one rank and on several, and compare the runs"
PAGE = "how-to/troubleshooting.md"

# The exit codes of a run that a user has ended, as by Ctrl-C: they tell nothing about the script.
_TOLD_TO_END = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))

_EPILOG = """\
The script runs twice: on one rank of this machine, and on the ranks that you ask
for. Then verify compares both runs step by step. Hooks that write files do not
run. The exit code is 0 if the runs are equal.

  mpitrain verify -n 4 examples/train.py --data digits
  mpitrain verify --steps 20 --hosts node1,node2 --ppn 2 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain verify [OPTION]... SCRIPT [ARGUMENT]..."
    parser.epilog = _EPILOG
    add_launch_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="number of steps to compare (5)")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="allowed relative difference (follows from the dtype)"
    )
    parser.add_argument("--directory", type=Path, metavar="PATH", help="keep the records in this folder")
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the script twice and compare the runs. Return the exit code."""
    if arguments.steps < 1:
        raise ConfigError(f"--steps is {arguments.steps}; it must be at least 1")
    if arguments.tolerance is not None and not 0 <= arguments.tolerance < float("inf"):
        raise ConfigError(f"--tolerance is {arguments.tolerance}; it must be a finite number of at least 0")
    request = request_of_script(arguments)
    if arguments.directory:
        return _verify(request, arguments.directory.absolute(), arguments.steps, arguments.tolerance)
    with tempfile.TemporaryDirectory(prefix="mpitrain-verify-") as directory:
        return _verify(request, Path(directory), arguments.steps, arguments.tolerance)


def _verify(request: Request, directory: Path, steps: int, tolerance: float | None) -> int:
    from mpitrain.context import VerifyTask
    from mpitrain.launch.start import start
    from mpitrain.verify.compare import compare
    from mpitrain.verify.comparison import report
    from mpitrain.verify.record_file import make_record, read_record

    one, records = replace(request, num_ranks=1, hosts="localhost", ranks_per_host=None), []
    for name, asked in (("one rank", one), ("several ranks", request)):
        print(f"verify: the run on {name}", flush=True)
        record = directory / name.replace(" ", "-")
        make_record(record)
        code = start(replace(asked, verify=VerifyTask(str(record), steps)))
        if code:
            why = f"the run on {name} failed ({code}); there is nothing to compare"
            print(f"mpitrain verify: {why}", file=sys.stderr)
            if code not in _TOLD_TO_END:
                _keep(request, [why], is_equal=None)
            return code if code > 128 else 1
        records.append(read_record(record))
        if not records[-1].lines:
            raise DataError(
                f"verify cannot see what {request.script} computes: on {name} there was no step of Trainer.run, of an "
                "optimizer of PyTorch (where mpitrain.torch is imported) or of a GradientReducer, and no call of "
                "world.mean or world.sum. Data exchanged in another way (by mpitrain.collectives, mpi4py or JAX's own "
                "collectives) is not recorded"
            )
    alone, together = records
    compared = compare(alone, together, tolerance)
    lines = list(report(alone, together, compared))
    for line in lines:
        print(f"verify: {line}")
    print(f"verify: {request.script}: {'not equal' if compared.differences else 'equal'}")
    _keep(request, lines, is_equal=not compared.differences)
    return int(bool(compared.differences))


def _keep(request: Request, lines: Sequence[str], *, is_equal: bool | None) -> None:
    """Keep the result for `mpitrain dashboard`."""
    from mpitrain.last_word import keep_word

    words = 2 if request.program[0] == "-m" else 1
    try:
        keep_word("verify", Path(request.script), request.program[words:], lines, is_equal=is_equal)
    except MpitrainError as error:
        print(f"mpitrain verify: {error}", file=sys.stderr)
