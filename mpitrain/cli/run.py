"""`mpitrain run`: start a script on several ranks, on this machine or on several hosts, and stay until its end."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from mpitrain.cli.job_id import complete_by, job_id, kept_here
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
again. With --elastic, the job also starts without hosts that do not answer, and
takes them in when they do.

If mpitrain run itself is lost, such a job is kept for a while, and --resume JOB
goes on with it. Give no other option with it but -i. The same holds if too few
hosts are left and the script saves nothing.

The exit code is not 0 if any rank failed. It is 128 + the number of the signal
if a signal ended the job.

  mpitrain run -n 4 train.py --epochs 5
  mpitrain run --hosts node1,node2 --ppn 2 train.py
  mpitrain run --hosts node1/cuda:0-3,node2/cuda:0-1x2 train.py
  mpitrain run -n 4 --show train.py --epochs 5
  mpitrain run --ppn 2 --restarts 5 --min-nodes 3 train.py
  mpitrain run --ppn 2 --restarts 5 --elastic 2:8 train.py
  mpitrain run --resume 1a2b3c4d
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
        "--min-nodes",
        type=positive,
        metavar="M",
        help="with --restarts: start again on at least M hosts (1); on fewer, only to save",
    )
    parser.add_argument(
        "--elastic",
        type=_range,
        metavar="MIN:MAX",
        help="with --restarts and --ppn: start on the hosts that answer, at least MIN and at most MAX, and take in "
        "those that come later",
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
    parser.add_argument(
        "--servers",
        type=positive,
        default=0,
        metavar="K",
        help="K ranks, the first of each host, hold the parameters, and the others work for them (for "
        "mt.ParameterServer)",
    )
    resume = parser.add_argument(
        "--resume",
        type=job_id,
        metavar="JOB",
        help="go on with a job whose `mpitrain run` was lost, by the id that ps shows",
    )
    complete_by(resume, kept_here)
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the mpiexec command, but do not run it; with --servers 2 or more, also run the script up to its "
        "Trainer",
    )
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the job. Return its exit code."""
    from mpitrain.launch.time_up import note_early

    note_early()  # the other imports take a while
    from mpitrain.launch.start import start
    from mpitrain.launch.verdict import Limits

    if arguments.resume is not None:
        from mpitrain.launch.resume import resume

        _refuse_with_resume(arguments)
        return resume(arguments.resume, arguments.inventory)
    request = request_of_script(arguments)
    if arguments.min_nodes is not None and not arguments.restarts:
        raise ConfigError("--min-nodes sets the least number of hosts for a restart; it needs --restarts N")
    if arguments.spares and not arguments.restarts:
        raise ConfigError("--spares keeps processes ready for a restart; it needs --restarts N")
    variables = {"MPITRAIN_TRACE": str(arguments.trace.absolute())} if arguments.trace else {}
    if arguments.elastic and arguments.min_nodes is not None:
        raise ConfigError("--elastic MIN:MAX sets the least number of hosts too; leave out --min-nodes")
    least, most = arguments.elastic or (arguments.min_nodes or 1, None)
    limits = Limits(arguments.restarts, least, most)
    request = replace(request, variables=variables, limits=limits, show=arguments.show)
    request = replace(request, servers=arguments.servers)
    return start(replace(request, recover=arguments.recover, spares=arguments.spares))


def _range(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MIN:MAX, as in 2:4")
    numbers = positive(least), positive(most)
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: MIN is {numbers[0]} and above MAX, {numbers[1]}")
    return numbers


def _refuse_with_resume(arguments: argparse.Namespace) -> None:
    """Refuse all that the job has from its own command."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    if given := [
        name
        for name, default in defaults.items()
        if name not in ("resume", "inventory") and getattr(arguments, name) != default
    ]:
        options = {"num_ranks": "-n", "module": "-m", "script": "SCRIPT"}
        words = ", ".join(options.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise ConfigError(f"--resume goes on with the command that started the job; leave out {words}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or above")
    return int(text)
