"""`mpitrain run`: start a script on several ranks, on this machine or on several hosts, and wait for its end."""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpitrain.cli.launching import (
    START_SECONDS,
    add_launch_arguments,
    add_script_arguments,
    positive,
    request_of_script,
)
from mpitrain.errors import ConfigError
from mpitrain.reading import shown, whole
from mpitrain.units import add_renamed

if TYPE_CHECKING:
    from mpitrain.launch.start import Request

HELP = "start a script on several ranks, here or on several hosts"

PAGE = "how-to/run-jobs.md"

_EPILOG = """\
Options after the script belong to the script. Without -n and --hosts, the job
runs on all hosts of the inventory. The exit code is 0 only if no rank failed.

  mpitrain run -n 4 train.py --epochs 5
  mpitrain run --hosts node1,node2 --ppn 2 train.py
  mpitrain run --nnodes 2:4 --ppn 1 --detach train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain run [OPTION]... SCRIPT [ARGUMENT]..."
    parser.epilog = _EPILOG
    add_launch_arguments(parser, takes_nnodes=True)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write what each rank did, as DIR/trace.json",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="restarts after failures (3 if there are checkpoints)",
    )
    parser.add_argument(
        "--recover",
        action="store_true",
        help="continue without a lost rank (needs Open MPI 5)",
    )
    parser.add_argument(
        "--exchange",
        choices=["mpitrain"],
        default="",
        help="process groups of gloo use mpitrain's exchange",
    )
    parser.add_argument(
        "--starter",
        choices=["mpiexec", "agent"],
        help="agent: start ranks that need no MPI without it",
    )
    parser.add_argument("--tf-config", action="store_true", help="set TensorFlow's TF_CONFIG in each rank")
    parser.add_argument(
        "--servers",
        type=positive,
        default=0,
        metavar="K",
        help="K ranks hold the parameters (mt.ParameterServer)",
    )
    parser.add_argument("--notify", default="", metavar="CMD|URL", help="tell it when the job fails, hangs or ends")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="write all output into DIR/JOB, by rank")
    parser.add_argument("--detach", action="store_true", help="continue without the terminal")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        dest="show",
        help="print the command, but do not run it",
    )
    add_renamed(
        parser,
        show="--dry-run",
        restarts="--max-restarts N",
        elastic="--nnodes MIN:MAX",
        min_nodes="the MIN of --nnodes MIN:MAX",
        max_nodes="the MAX of --nnodes MIN:MAX",
        resume="another command: mpitrain resume JOB",
        spares="part of every job that may start again: leave it out",
    )
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the job. Return its exit code."""
    from mpitrain.launch.time_limit import note_early

    note_early()  # the other imports take a while
    from mpitrain.launch.events import Limits
    from mpitrain.launch.notify import checked
    from mpitrain.launch.start import start

    request = request_of_script(arguments)
    least, most = arguments.nnodes or (1, None)
    if arguments.max_restarts == 0 and least != (most or least):
        raise ConfigError(
            f"--nnodes {least}:{most} starts the job again when its hosts change, and --max-restarts 0 forbids it; "
            "leave out --max-restarts 0, or name one number of hosts"
        )
    request = replace(
        request,
        variables={"MPITRAIN_TRACE": str(arguments.trace.absolute())} if arguments.trace else {},
        limits=Limits(arguments.max_restarts, least, most),
        show=arguments.show,
        servers=arguments.servers,
        recover=arguments.recover,
        exchange=arguments.exchange,
        tf_config=arguments.tf_config,
        notify=checked(arguments.notify) if arguments.notify else "",
        keeps_logs=not arguments.show,
        log_dir=_writable(arguments.log_dir) if arguments.log_dir and not arguments.show else None,
        detaches=arguments.detach and not arguments.show,
    )
    kind = aware_of(Path(request.script))
    if kind in ("torchrun", "either"):
        if request.exchange:
            print("mpitrain: process groups of gloo use mpitrain's exchange in all ranks", file=sys.stderr, flush=True)
        for remark in remarks(Path(request.script), request.num_ranks or 0):
            print(f"mpitrain: {remark}", file=sys.stderr, flush=True)
    request = replace(request, starter=_starter(arguments, request, kind))
    if kind in ("torchrun", "either") or request.starter == "agent":
        # Its ranks may end at any time, and have no init() that says whether they are late.
        seconds = 0.0 if request.start_seconds == START_SECONDS else request.start_seconds
        request = replace(request, start_seconds=seconds, limits=replace(request.limits, counts_steps=False))
    if request.num_ranks != 1 and not arguments.show and not kind:
        print(
            f"mpitrain: {request.script} uses neither mpitrain nor torch.distributed: each rank runs all of it "
            "alone, and all write the same files. See README.md#documentation for the lines that divide the work; or "
            "start one: -n 1",
            file=sys.stderr,
            flush=True,
        )
    if not request.detaches:
        return start(request)
    from mpitrain.launch.detach import detach

    return detach(lambda when_started: start(request, when_started=when_started), _follow)


def _starter(arguments: argparse.Namespace, request: Request, kind: str) -> Literal["mpiexec", "agent"]:
    """Return what starts the ranks. If the agents do that because nothing asks for MPI, print why.

    Raises:
        ConfigError: an option needs MPI, and --starter agent goes without it.
    """
    needed = {
        "--exchange": request.exchange,
        "--servers": request.servers,
        "--recover": request.recover,
        "--mpiexec": request.mpiexec,
    }
    options = [name for name, value in needed.items() if value]
    if options and arguments.starter == "agent":
        raise ConfigError(f"{options[0]} needs MPI, and --starter agent starts ranks without it; leave out one of them")
    if arguments.starter or options or kind == "mpi":
        return arguments.starter or "mpiexec"
    if PathFinder.find_spec("mpi4py") is None:
        why = f"{sys.executable} has no mpi4py"
    elif kind == "torchrun":
        why = f"{request.script} does not use it"
    else:  # an installed package may use MPI, and the script does not name it
        return "mpiexec"
    print(f"mpitrain: the ranks start without MPI: {why} (--starter mpiexec: with MPI)", file=sys.stderr, flush=True)
    return "agent"


def _follow(job: str) -> str:
    """Print how to watch a job that has no terminal."""
    lines = {
        f"mpitrain logs -f {job}": "shows what it prints",
        f"mpitrain top {job}": "shows what its ranks do",
        f"mpitrain kill {job}": "ends it",
    }
    return "\n".join(f"  {command:<28}{meaning}" for command, meaning in lines.items())


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.absolute()
    except OSError as error:
        raise ConfigError(f"--log-dir {folder} cannot be written: {error.strerror}; name a folder of yours") from None


def _count(text: str) -> int:
    number = whole(text, 0, 10**20)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number, 0 or above")
    return number


# A script is aware of ranks if it, or a module of its own, imports one of these, or contains one of the words.
_LIBRARIES = ("mpitrain", "mpi4py")
_OF_MPI = (*_LIBRARIES, "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD", "_MPITRAIN_")
# For scripts that torchrun, accelerate or Lightning may start: the launcher gives them torchrun's variables.
_OF_TORCHRUN = (
    *("torch.distributed", "LOCAL_RANK", "WORLD_SIZE", '"RANK"', "'RANK'", "TORCHELASTIC", "jax.distributed"),
    *(
        "accelerate",
        "lightning",
        "deepspeed",
        "transformers",
        "ignite",
        "horovod",
        "composer",
        "colossalai",
        "fairscale",
    ),
)
# Of those, what may be set to use MPI.
_OF_EITHER = ("horovod", '"mpi"', "'mpi'")
_MOST_FILES = 300
_INSTALLED = ("site-packages", "dist-packages")


def aware_of(script: Path) -> Literal["mpi", "torchrun", "either", ""]:
    """Return how this script, or what it imports, knows of other ranks, as far as can be seen; "": it does not.

    A script that cannot be read is one of "mpi". One of "either" has torchrun's ways, and may use MPI too.
    """
    found: Literal["torchrun", "either", ""] = ""
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
            if any(word in text for word in _OF_MPI):
                return "mpi"
            if len(seen) > _MOST_FILES:  # a script in a checkout of its library
                return found or "mpi"
            if any(word in text for word in _OF_TORCHRUN) and found != "either":
                found = "torchrun"
            if found and any(word in text for word in _OF_EITHER):
                found = "either"
            with warnings.catch_warnings(action="ignore"):  # the ranks print those of the compiler
                names = set(_imported(ast.parse(text)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return "mpi"
        for name in names - sys.stdlib_module_names:
            place = _origin(name, path)
            if place is None:
                if _needs_ranks(name):
                    return "mpi"
            else:
                waiting += place.rglob("*.py") if place.is_dir() else [place]
    return found


_SPAWNS = re.compile(r"\b(mp|multiprocessing|xmp)\.spawn\(|\bnotebook_launcher\(|\bstart_processes\(")
_OPTION = re.compile(r"""add_argument\(\s*["']--local[-_]rank["']""")


def remarks(script: Path, num_ranks: int) -> list[str]:
    """Return warnings about a script for torchrun that will not do what the user means, as far as can be detected."""
    try:
        text = script.read_text(errors="replace")
    except OSError:
        return []
    said = []
    if num_ranks != 1 and _SPAWNS.search(text):
        said.append(
            f"{script} has a call that starts ranks itself, such as mp.spawn. If it makes this call, each rank of this "
            "job starts as many: start it once then, with -n 1"
        )
    if _OPTION.search(text) and "LOCAL_RANK" not in text:
        said.append(
            f"{script} takes its local rank from the option --local-rank, which torchrun and mpitrain do not pass: all "
            'ranks would take the first GPU. Let it read int(os.environ["LOCAL_RANK"])'
        )
    return said


def _imported(tree: ast.AST) -> Iterator[str]:
    """The first parts of the names of what a module imports; of relative imports all files are read anyway."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _origin(name: str, path: list[str]) -> Path | None:
    """The file or folder of a module that is the user's own; None: it is installed, built in, or not found."""
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
    from importlib.metadata import PackageNotFoundError, requires

    try:
        needed = requires(name) or []
    except (PackageNotFoundError, ValueError):
        return False
    return any(need.startswith(_LIBRARIES) and "extra ==" not in need for need in needed)
