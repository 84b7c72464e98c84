"""`mpitrain run`: start a script on several ranks, on this machine or on several hosts, and stay until its end."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from mpitrain.cli.changing import complete_by, job_id, kept_here
from mpitrain.cli.launching import add_launch_arguments, add_script_arguments, positive, request_of_script
from mpitrain.errors import ConfigError
from mpitrain.reading import shown, whole
from mpitrain.units import add_renamed

HELP = "start a script on several ranks, here or on several hosts"

PAGE = "how-to/run-jobs.md"

_EPILOG = """\
Options behind the script belong to the script. Without -n and --hosts, the job
runs on all hosts of the inventory. The exit code is 0 only if no rank failed.

  mpitrain run -n 4 train.py --epochs 5
  mpitrain run --hosts node1,node2 --ppn 2 train.py
  mpitrain run --hosts node1,node2,node3 --ppn 1 --restarts 5 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain run [OPTION]... SCRIPT [ARGUMENT]..."
    parser.epilog = _EPILOG
    add_launch_arguments(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write what each rank did, as DIR/trace.json",
    )
    parser.add_argument(
        "--restarts", type=_count, default=0, metavar="N", help="start again after a failure, N times at most (0)"
    )
    parser.add_argument(
        "--min-nodes",
        type=positive,
        metavar="M",
        help="with --restarts: on M hosts at least (1)",
    )
    parser.add_argument(
        "--elastic",
        type=_range,
        metavar="MIN:MAX",
        help="with --restarts: train on the hosts that answer",
    )
    parser.add_argument(
        "--spares",
        action="store_true",
        help="with --restarts: keep processes ready to be ranks",
    )
    parser.add_argument(
        "--recover",
        action="store_true",
        help="continue without a lost rank (needs Open MPI 5)",
    )
    parser.add_argument(
        "--servers",
        type=positive,
        default=0,
        metavar="K",
        help="K ranks hold the parameters (mt.ParameterServer)",
    )
    resume = parser.add_argument(
        "--resume",
        type=job_id,
        metavar="JOB",
        help="continue a job whose `mpitrain run` was lost",
    )
    complete_by(resume, kept_here)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        dest="show",
        help="print the mpiexec command, but do not run it",
    )
    add_renamed(parser, show="--dry-run")
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the job. Return its exit code."""
    from mpitrain.launch.time_limit import note_early

    note_early()  # the other imports take a while
    from mpitrain.launch.events import Limits
    from mpitrain.launch.start import start

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
    if request.num_ranks != 1 and not arguments.show and is_unaware(Path(request.script)):
        print(
            f"mpitrain: {request.script} does not import mpitrain: each rank runs all of it alone, and all write the "
            "same files. See README.md#documentation for the lines that divide the work; or start one: -n 1",
            file=sys.stderr,
            flush=True,
        )
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
        options = {"num_ranks": "-n", "module": "-m", "script": "SCRIPT", "show": "--dry-run"}
        words = ", ".join(options.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise ConfigError(f"--resume continues with the command that started the job; leave out {words}")


def _count(text: str) -> int:
    number = whole(text, 0, 10**20)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number, 0 or above")
    return number


# A script knows of ranks if it, or a module of its own, imports one of these, or has one of the words in it.
_LIBRARIES = ("mpitrain", "mpi4py")
_WORDS = (*_LIBRARIES, "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD", "_MPITRAIN_")
_MOST_FILES = 300
_INSTALLED = ("site-packages", "dist-packages")


def is_unaware(script: Path) -> bool:
    """Return True if neither this script nor what it imports, as far as can be seen, has to do with ranks."""
    path = [str(script.resolve().parent), str(Path.cwd()), *sys.path]
    seen: set[Path] = set()
    waiting = [script.resolve()]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            text = file.read_text(errors="replace")
            if any(word in text for word in _WORDS) or len(seen) > _MOST_FILES:
                return False
            names = set(_imported(ast.parse(text)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        for name in names - sys.stdlib_module_names:
            place = _origin(name, path)
            if place is None:
                if _needs_ranks(name):
                    return False
            else:
                waiting += place.rglob("*.py") if place.is_dir() else [place]
    return True


def _imported(tree: ast.AST) -> Iterator[str]:
    """The first parts of the names of what a module imports; of relative imports all files are read anyway."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _origin(name: str, path: list[str]) -> Path | None:
    """The file or folder of a module that is the user's own; None: it is installed, built in, or not to be place."""
    try:
        spec = PathFinder.find_spec(name, path)
    except (ImportError, ValueError):
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    place = next((Path(one) for one in places if one), None)
    if place is None or not place.exists() or place.suffix not in ("", ".py"):
        return None
    return None if any(part in place.parts for part in _INSTALLED) else place


def _needs_ranks(name: str) -> bool:
    """True if an installed package of this name declares that it needs MPI or mpitrain."""
    try:
        needed = requires(name) or []
    except (PackageNotFoundError, ValueError):
        return False
    return any(need.startswith(_LIBRARIES) and "extra ==" not in need for need in needed)
