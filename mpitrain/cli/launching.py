"""The options that say where and how ranks are started; those of `mpitrain run`, `bench` and `verify`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError

if TYPE_CHECKING:
    from mpitrain.launch.start import Request


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say where and how ranks are started."""
    # No default: the number of ranks changes the global batch, so it should be in the command that made a result.
    parser.add_argument("-n", type=_num_ranks, dest="num_ranks", metavar="N", help="number of ranks")
    parser.add_argument(
        "--hosts", metavar="A,B", help="hosts, with or without devices: a,b or a/cuda:0-3x2,b/cpux4 or localhost"
    )
    parser.add_argument("--ppn", type=positive, metavar="N", help="ranks on each host")
    add_inventory_argument(parser)
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


def add_inventory_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option that says which nodes there are."""
    parser.add_argument(
        "-i",
        type=Path,
        dest="inventory",
        metavar="PATH",
        help="the cluster's hosts (./cluster/hosts, /etc/mpitrain/hosts)",
    )


def request_of(arguments: argparse.Namespace, program: Sequence[str], script: str, typed: Sequence[str]) -> Request:
    """What the options of `add_launch_arguments` ask of the launcher. For the other arguments see Request."""
    from mpitrain.launch.start import Request

    return Request(
        program=program,
        script=script,
        typed=typed,
        num_ranks=arguments.num_ranks,
        hosts=arguments.hosts,
        ranks_per_host=arguments.ppn,
        inventory=arguments.inventory,
        start_seconds=arguments.start_seconds,
        env_file=arguments.env_file,
        mpiexec=arguments.mpiexec,
    )


def request_of_script(arguments: argparse.Namespace) -> Request:
    """The same, where the positional arguments are a script and those of the script."""
    if not Path(arguments.script).is_file():
        raise ConfigError(f"there is no script {arguments.script!r} in {Path.cwd()}")
    words = [arguments.script, *arguments.arguments]
    return request_of(arguments, words, arguments.script, [arguments.command, *words])


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the positional arguments: a script and its arguments."""
    parser.add_argument("script", help="Python script")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    rest.required = False  # else Python 3.11 names it too where the script is missing


def positive(text: str) -> int:
    """The number that an option's text says; above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _num_ranks(text: str) -> int:
    if text.startswith("p"):  # argparse reads -np 4, as many an mpiexec has it, as -n with the text p
        raise argparse.ArgumentTypeError("-np is mpiexec's; here it is -n N, or --ppn N for the ranks on each host")
    return positive(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or above")
    return seconds
