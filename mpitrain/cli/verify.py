"""`mpitrain verify`: does a script compute the same on several ranks as on one?"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpitrain.cli.run import add_launch_arguments, launch
from mpitrain.errors import ConfigError, DataError

HELP = "run a script on one rank and on several, and say where they first differ"

_EPILOG = """\
The script runs twice, on one rank of this machine and on the ranks that the options
ask for, each time for --steps steps. Then samples, weights, losses, mean gradients,
learning rates and metrics of both runs are compared, step by step: samples, weights
and rates exactly, the rest to half of the digits of the dtype.

Seen are the steps of Trainer.run, and the metrics of Evaluate; without a Trainer the
calls of world.mean and world.sum, and the samples of world.shard. The script ends
after the last of them; hooks that write files, such as Checkpoint, are left out.

The exit code is 0 if the runs are equal, 1 if they differ or one of them failed.

  mpitrain verify -n 4 examples/train.py --data digits
  mpitrain verify --steps 20 --hosts node1,node2 --ppn 2 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_launch_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="how many steps (5)")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="allowed relative difference, instead of the dtype's"
    )
    parser.add_argument("--directory", type=Path, metavar="PATH", help="keep the records here")
    parser.add_argument("script", help="Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the script twice, compare; returns the exit code."""
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: it takes at least 1")
    if arguments.tolerance is not None and not 0 <= arguments.tolerance < float("inf"):
        raise ConfigError(f"--tolerance {arguments.tolerance}: a number of 0 or above")
    if not Path(arguments.script).is_file():
        raise ConfigError(f"there is no script {arguments.script!r} in {Path.cwd()}")
    if arguments.directory:
        return _verify(arguments, arguments.directory.absolute())
    with tempfile.TemporaryDirectory(prefix="mpitrain-verify-") as directory:
        return _verify(arguments, Path(directory))


def _verify(arguments: argparse.Namespace, directory: Path) -> int:
    from mpitrain.verify.compare import compare
    from mpitrain.verify.record import read_record
    from mpitrain.verify.report import report

    words = [arguments.script, *arguments.arguments]
    one = argparse.Namespace(**{**vars(arguments), "num_ranks": 1, "hosts": "localhost", "ppn": None})
    for name, options in (("one rank", one), ("several ranks", arguments)):
        print(f"verify: the run on {name}", flush=True)
        with _recorded(directory / name.replace(" ", "-"), arguments.steps):
            code = launch(options, words, file=arguments.script, typed=words)
        if code:
            print(f"mpitrain verify: the run on {name} failed ({code}); there is nothing to compare", file=sys.stderr)
            return code if code > 128 else 1
    alone, together = (read_record(directory / name) for name in ("one-rank", "several-ranks"))
    if not alone.lines and not together.lines:
        raise DataError(
            f"it cannot see what {arguments.script} computes: there was no step of Trainer.run, and no call of "
            "world.mean or world.sum. What is exchanged in another way (by a GradientReducer of the script's own, "
            "mpitrain.collectives, mpi4py) is not recorded"
        )
    found = compare(alone, together, arguments.tolerance)
    for line in report(alone, together, found):
        print(f"verify: {line}")
    print(f"verify: {arguments.script}: {'not equal' if found.differences else 'equal'}")
    return int(bool(found.differences))


@contextmanager
def _recorded(directory: Path, steps: int) -> Iterator[None]:
    """The job that is started in this block writes its record there."""
    own = {"MPITRAIN_VERIFY_RECORD": str(directory), "MPITRAIN_VERIFY_STEPS": str(steps)}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
