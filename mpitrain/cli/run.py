"""`mpitrain run`: start a script on several ranks, on this machine or on several hosts, and stay until its end."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from mpitrain.cli.launching import add_launch_arguments, add_script_arguments, positive, request_of_script
from mpitrain.errors import ConfigError

HELP = "start a script on several ranks, here or on several hosts"

_EPILOG = """\
Options after the script belong to the script. The ranks run the same Python as
mpitrain, with the mpiexec beside it, or else the one on PATH. Equal lines of
several ranks are printed once, after the ranks: "[0-3] loss 0.31".
The ranks read nothing from stdin. Ctrl-C ends all of them.

On a node of a cluster the job runs on all nodes of the cluster. To run it only
here, give --hosts localhost. Before the start, mpitrain compares the code and
the packages of all hosts. If a host vanishes, or the start does not finish, the
job ends on all hosts.

With --restarts, a job that fails during training starts again on the hosts that
answer. A Trainer goes on from a copy in memory or, if that is newer, from its
newest checkpoint. A job that fails three times at the same step does not start
again.

The exit code is not 0 if any rank failed. It is 128 + the number of the signal
if a signal ended the job.

  mpitrain run -n 4 train.py --epochs 5
  mpitrain run --hosts node1,node2 --ppn 2 train.py
  mpitrain run --hosts node1/cuda:0-3,node2/cuda:0-1x2 train.py
  mpitrain run -n 4 --show train.py --epochs 5
  mpitrain run --ppn 2 --restarts 5 --min-nodes 3 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_launch_arguments(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write DIR/trace.json at the end: what each rank computed and waited for (MPITRAIN_TRACE)",
    )
    parser.add_argument(
        "--restarts", type=_count, default=0, metavar="N", help="start again after a failure, at most N times (0)"
    )
    parser.add_argument(
        "--min-nodes", type=positive, metavar="M", help="with --restarts: start again on at least M hosts (1)"
    )
    parser.add_argument(
        "--spares",
        action="store_true",
        help="with --restarts: keep processes ready that become the ranks after a failure",
    )
    parser.add_argument(
        "--recover",
        action="store_true",
        help="if a rank is lost, go on without it; needs Open MPI 5",
    )
    parser.add_argument("--show", action="store_true", help="print the mpiexec command, but do not run it")
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the job. Return its exit code."""
    from mpitrain.launch.start import start
    from mpitrain.launch.supervisor import Limits

    request = request_of_script(arguments)
    if arguments.min_nodes is not None and not arguments.restarts:
        raise ConfigError("--min-nodes sets the least number of hosts for a restart; it needs --restarts N")
    if arguments.spares and not arguments.restarts:
        raise ConfigError("--spares keeps processes ready for a restart; it needs --restarts N")
    variables = {"MPITRAIN_TRACE": str(arguments.trace.absolute())} if arguments.trace else {}
    limits = Limits(arguments.restarts, arguments.min_nodes or 1)
    request = replace(request, variables=variables, limits=limits, show=arguments.show)
    return start(replace(request, recover=arguments.recover, spares=arguments.spares))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or above")
    return int(text)
