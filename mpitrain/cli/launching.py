"""The options of `mpitrain run`, `bench` and `verify` that determine where and how ranks are started."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.reading import is_file, shown, whole
from mpitrain.units import add_foreign, add_renamed, timeout

if TYPE_CHECKING:
    from mpitrain.launch.start import Request

START_SECONDS = 60.0  # the default of --start-timeout

# Options of other launchers, and what they are called here.
_A_HOSTS = "--hosts A,B or -H A,B, with --ppn N for the ranks on each host, or -H A:2,B:1"
_A_FILE = "--hostfile FILE, or an Ansible inventory with -i PATH"
_ELSEWHERE = {
    **dict.fromkeys(("-host", "--host", "-hosts"), _A_HOSTS),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile", "-f"), _A_FILE),
    **dict.fromkeys(("-ppn", "--nproc-per-node", "--nproc_per_node", "--npernode", "-N"), "--ppn N"),
}
_NNODES = ("--num-nodes", "--num_nodes", "--nnodes")

# Options that set the number of ranks; and those that scripts hardly ever have.
_RANKS = ("-n", "-np", "--ppn", "--hosts", "-H", "--hostfile")
_OURS_ALONE = ("--max-restarts", "--nnodes", "--recover", "--detach", "--notify")


def add_launch_arguments(parser: argparse.ArgumentParser, *, takes_nnodes: bool = False) -> None:
    """Declare the options that determine where and how ranks are started; with `takes_nnodes` also on how many
    hosts."""
    # There is no default: the number of ranks changes the global batch, so the command of a result should state it.
    parser.add_argument("-n", "-np", type=positive, dest="num_ranks", metavar="N", help="number of ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        "-H",
        metavar="A,B",
        help="hosts, as in a,b or a:4,b:2 or a/cuda:0-3,b/cpux4",
    )
    where.add_argument(
        "--hostfile",
        type=_hosts_of_file,
        dest="hosts",
        metavar="FILE",
        help="hosts from a file with lines HOST, HOST:N, slots=N",
    )
    parser.add_argument("--ppn", type=positive, metavar="N", help="ranks on each host")
    if takes_nnodes:
        parser.add_argument("--nnodes", type=_range, metavar="N|MIN:MAX", help="on N hosts, or on MIN to MAX of them")
    add_inventory_argument(parser)
    parser.add_argument(
        "--start-timeout",
        type=timeout,
        default=START_SECONDS,
        metavar="T",
        help="limit of a start over hosts (60s; 0: none)",
    )
    add_renamed(parser, start_seconds="--start-timeout, with a unit: --start-timeout 60s")
    parser.add_argument(
        "--env-file",
        metavar="FILE",
        help="variables for the ranks (MPITRAIN_ENV_FILE)",
    )
    parser.add_argument("--mpiexec", type=Path, metavar="FILE", help="use this mpiexec")
    on_hosts = "--nnodes N" if takes_nnodes else "--hosts A,B, or --ppn N for all hosts of the inventory"
    elsewhere = _ELSEWHERE | dict.fromkeys(_NNODES[:2] if takes_nnodes else _NNODES, on_hosts)
    add_foreign(parser, {name: f"is another launcher's; here it is {ours}" for name, ours in elsewhere.items()})


def add_inventory_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option that names the inventory."""
    parser.add_argument(
        "-i",
        "--inventory",
        type=Path,
        metavar="FILE",
        help="the hosts (cluster/hosts, /etc/mpitrain/hosts)",
    )


def request_of(arguments: argparse.Namespace, program: Sequence[str], script: str, typed: Sequence[str]) -> Request:
    """Turn the options of `add_launch_arguments` into a request. For the other arguments see Request."""
    from mpitrain.launch.start import Request

    return Request(
        program=program,
        script=script,
        typed=typed,
        num_ranks=arguments.num_ranks,
        hosts=arguments.hosts,
        ranks_per_host=arguments.ppn,
        inventory=arguments.inventory,
        start_seconds=arguments.start_timeout,
        env_file=arguments.env_file,
        mpiexec=arguments.mpiexec,
    )


def request_of_script(arguments: argparse.Namespace) -> Request:
    """Turn all arguments into a request: the launch options, then a script (or -m and a module) with its arguments."""
    words, script = script_of(arguments)
    _look_behind(arguments, words)
    return request_of(arguments, words, script, [arguments.command, *words])


def _look_behind(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Refuse options of mpitrain that come after the script and are missing before it; print a warning about others."""
    behind = dict.fromkeys(word.partition("=")[0] for word in words)
    where = f"after {words[1] if words[0] == '-m' else words[0]} and belongs to the script"
    before = f"as in `mpitrain {arguments.command} -n 4 train.py`"
    if arguments.num_ranks is None and arguments.ppn is None and not {"/", ":"} & set(arguments.hosts or ""):
        for option in [option for option in _RANKS if option in behind]:
            raise ConfigError(f"{option} comes {where}; options of mpitrain come before the script, {before}")
    for option in [option for option in _OURS_ALONE if option in behind]:
        print(f"mpitrain: {option} comes {where}; options of mpitrain come before the script", file=sys.stderr)


def script_of(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """Return Python's arguments (a script, or -m and a module, with its arguments) and the file to run.

    Raises:
        ConfigError: no script is named, or there is no such file.
    """
    module = ["-m", *arguments.module] if arguments.module is not None else []
    script = arguments.script
    if script[:1] == ["--"] and not module[1:]:  # the end of our options; behind a module it is the module's
        script = script[1:]
    words = _without_python([*module, *script])
    if not words or words == ["-m"]:
        example = {"serve": "serve", "work": "work HOST:5000"}.get(arguments.command, "run -n 4")
        raise ConfigError(f"name a script, as in `mpitrain {example} train.py`, or -m MODULE")
    _refuse_launcher(words, arguments.command)
    script = _file_of(words[1]) if words[0] == "-m" else words[0]
    if not is_file(script):
        raise ConfigError(f"there is no script {script!r} in {Path.cwd()}")
    return words, script


def _without_python(words: list[str]) -> list[str]:
    """Drop the first word of `python train.py`, as given to mpiexec, if the ranks run this Python anyway."""
    if not words or not re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        return words
    path = shutil.which(words[0])
    # Do not use samefile(): the Pythons of two environments are links to the same file.
    if path is None or Path(path).absolute().parent != Path(sys.executable).parent:
        raise ConfigError(
            f"the ranks run {sys.executable}, but {words[0]!r} is {path or 'not to be found'}; leave out {words[0]}, "
            "or use the mpitrain of the other Python"
        )
    return words[1:]


# Launchers of ranks, by the words with which they begin, and how each is told the number of ranks on a host.
_LAUNCHERS = (
    *("torchrun", "-m torch.distributed.run", "-m torch.distributed.launch"),
    *("accelerate", "horovodrun", "deepspeed", "mpirun", "mpiexec"),
)
_NUMBER = re.compile(r"--?(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|np?)(?:=(\d+))?")


def _refuse_launcher(words: Sequence[str], command: str) -> None:
    """Refuse another launcher in place of the script: each rank would start its own ranks."""
    named = " ".join(words[: 2 if words[0] == "-m" else 1])
    if (Path(named).name if words[0] != "-m" else named) not in _LAUNCHERS:
        return
    rest = words[len(named.split()) :]
    at = next((number for number, word in enumerate(rest) if word.endswith(".py")), len(rest))
    options = rest[:at]
    number = next(
        (found[1] or after for word, after in pairwise([*options, ""]) if (found := _NUMBER.fullmatch(word))), ""
    )
    line = shlex.join(["mpitrain", command, "-n", number if number.isdecimal() else "4", *(rest[at:] or ["train.py"])])
    raise ConfigError(f"{named} starts ranks itself, and mpitrain takes its place: {line}")


def _file_of(module: str) -> str:
    """Find the file that `python -m` runs, without importing anything."""
    path = [str(Path.cwd()), *sys.path]
    names = module.split(".")
    for number in range(1, len(names) + 1):
        # Search by the last part of the name: for a full name, the finder needs the parent to be imported.
        spec = PathFinder.find_spec(names[number - 1], path)
        path = list(spec.submodule_search_locations or []) if spec else []
        if spec and path and number == len(names):
            spec = PathFinder.find_spec("__main__", path)
    if not spec or not spec.origin:
        raise ConfigError(
            f"there is no module {module!r} to run, neither in {Path.cwd()} nor in the packages of {sys.executable}"
        )
    return spec.origin


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the script, or a module, and its arguments."""
    parser.add_argument(
        "-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE", help="run a module, as python -m does"
    )
    # Use one list: argparse would remove a "--" from a second one, but that "--" may belong to the script.
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="Python script, followed by its arguments"
    )


def positive(text: str) -> int:
    """Convert an option's text to a whole number above 0."""
    number = whole(text, 1, 10**20)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number above 0")
    return number


def _range(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    numbers = positive(least), positive(most if colon else least)
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: MIN is {numbers[0]}, which is above MAX, {numbers[1]}")
    return numbers


def _hosts_of_file(text: str) -> str:
    from mpitrain.launch.hosts import read_hostfile

    try:
        return read_hostfile(Path(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--hostfile ")) from None
