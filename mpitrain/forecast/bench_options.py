"""The options of the bench, and their check, which needs no ranks.

This module is light: the command line loads it before it knows which command is meant.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.reading import is_folder
from mpitrain.units import add_renamed, rate_gbit, timeout

POINT_TO_POINT = "point_to_point"
ALL = "all"
DEVICES = ("host", "cuda")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Options:
    """What is measured; the defaults are in `add_arguments`.

    Attributes:
        operations: names of operations.OPERATIONS, and point_to_point.
        sizes_bytes: sizes of the buffers.
        dtypes: names of dtypes that can be summed.
        device: where the buffers are: "host", or "cuda" for this rank's GPU.
        algorithms: names of allreduce algorithms; on GPUs, of transports.
        has_all_algorithms: `all` was requested: algorithms that refuse this world are left out.
        codecs: `none`, and names of compression.CODECS, with their setting if they have one.
        rounds: rounds per cell; None: as many as fit into `seconds`.
        seconds: approximate time per cell.
        link_gbit: nominal rate between nodes, Gbit/s; None: the rate that the driver reports.
        json, csv, plot, save_profile: files to write.
        progress: show a progress line on the terminal.
        dry_run: measure nothing; print what would be chosen.
    """

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    device: str
    algorithms: tuple[str, ...]
    has_all_algorithms: bool
    codecs: tuple[str, ...]
    rounds: int | None
    seconds: float
    link_gbit: float | None
    json: Path | None
    csv: Path | None
    plot: Path | None
    save_profile: Path | None
    progress: bool
    dry_run: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the bench's own options; the launcher declares the options that start the ranks."""
    add = parser.add_argument
    add("--operation", default="allreduce", metavar="A,B", help=f"what to measure (allreduce), {POINT_TO_POINT}")
    add("--sizes", default="4K,64K,1M,16M,100M", metavar="N,M", help="buffer sizes in bytes (4K,64K,1M,16M,100M)")
    add("--dtypes", default="float32", metavar="A,B", help="dtypes of the elements (float32)")
    add("--device", default="host", metavar="WHERE", help="where the buffers are (host), or cuda for GPUs")
    add("--algorithms", default="auto", metavar="A,B", help=f"algorithms; on GPUs, transports (auto), {ALL}")
    add("--dry-run", action="store_true", help="print what would be measured; measure nothing")
    add("--codecs", default="none", metavar="A,B", help="how buffers are compressed on the wire (none)")
    add("--rounds", metavar="N", help="rounds per size (3 to 200, by --time)")
    add("--time", default="3s", metavar="T", help="approximate time per size (3s)")
    add("--link", metavar="RATE", help="rate between nodes (what the driver reports)")
    add("--json", metavar="FILE", help="write all results and versions")
    add("--csv", metavar="FILE", help="write the table")
    add("--plot", metavar="FILE", help="plot the results: .png, .svg or .pdf")
    add("--save-profile", metavar="FILE", help="measure what the choice of algorithms needs, < 60 s")
    add("--progress", action="store_true", help="show a progress line on the terminal")
    add_renamed(
        parser,
        show="--dry-run",
        seconds="--time, with a unit: --time 3s",
        link_gbit="--link, with a unit: --link 1Gbit/s",
    )


def words_of(arguments: argparse.Namespace) -> list[str]:
    """The options in `arguments` as a command line for the ranks."""
    words = []
    for name in sorted(_given(arguments)):
        value, option = getattr(arguments, name), "--" + name.replace("_", "-")
        words.append(option if value is True else f"{option}={value}")
    return words


def _given(arguments: argparse.Namespace) -> set[str]:
    """The names of the bench's own options that are not at their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {name for name, default in vars(parser.parse_args([])).items() if getattr(arguments, name) != default}


def read_options(arguments: argparse.Namespace, *, writes: bool = True) -> Options:
    """Check and return the options.

    Args:
        writes: the files are written here, as on rank 0. The folders of other hosts do not matter.

    Raises:
        ConfigError: a name is unknown, a size or number is malformed, a file cannot be written, or an option would be
            ignored.
    """
    from mpitrain.allreduce import ALGORITHMS
    from mpitrain.allreduce.algorithm import DTYPES
    from mpitrain.compression import CODECS, factory_of
    from mpitrain.cuda.transports import TRANSPORTS
    from mpitrain.forecast.operations import NO_CODEC, OPERATIONS

    if arguments.device not in DEVICES:
        raise ConfigError(f"--device is {arguments.device!r}; allowed are {' and '.join(DEVICES)}")
    operations = _names("operation", arguments.operation, [*OPERATIONS, POINT_TO_POINT])
    _refuse_ignored(arguments, operations)
    is_on_gpus = arguments.device == "cuda"
    kind, algorithms = ("transport", sorted(TRANSPORTS)) if is_on_gpus else ("algorithm", sorted(ALGORITHMS))
    chosen = algorithms if arguments.algorithms == ALL else _names(kind, arguments.algorithms, algorithms)
    if is_on_gpus and (arguments.operation != "allreduce" or arguments.codecs != NO_CODEC):
        raise ConfigError("--device cuda measures --operation allreduce with --codecs none only")
    codecs = [name.strip() for name in arguments.codecs.split(",")]
    _names("codec", ",".join(name.partition(":")[0] for name in codecs), [NO_CODEC, *CODECS])
    for name in codecs:
        if name != NO_CODEC:
            factory_of(name)  # raises if the setting is wrong
    if NO_CODEC not in codecs and chosen != ["auto"]:
        raise ConfigError(
            f"--algorithms {arguments.algorithms} applies to sums without a codec, but --codecs is {arguments.codecs}; "
            f"use --codecs {NO_CODEC},{arguments.codecs}"
        )
    dtypes = _names("dtype", arguments.dtypes, [str(dtype) for dtype in DTYPES])
    if any(codec != NO_CODEC for codec in codecs) and dtypes != ["float32"]:
        raise ConfigError(f"--dtypes is {arguments.dtypes}; codecs take float32 only")
    sizes = tuple(parse_size(text) for text in arguments.sizes.split(","))
    if small := [size for size in sizes if any(size < dtype.itemsize for dtype in DTYPES if str(dtype) in dtypes)]:
        raise ConfigError(f"--sizes: {small[0]} bytes is less than one element of {arguments.dtypes}")
    files = {name: Path(text) if (text := getattr(arguments, name)) else None for name in _FILES}
    if writes:
        _check_files(files)
    return Options(
        operations=tuple(operations),
        sizes_bytes=sizes,
        dtypes=tuple(dtypes),
        device=arguments.device,
        algorithms=tuple(chosen),
        has_all_algorithms=arguments.algorithms == ALL,
        codecs=tuple(dict.fromkeys(codecs)),
        rounds=None if arguments.rounds is None else _whole_number("--rounds", arguments.rounds),
        seconds=_quantity("--time", arguments.time, timeout),
        link_gbit=None if arguments.link is None else _quantity("--link", arguments.link, rate_gbit),
        progress=arguments.progress,
        dry_run=arguments.dry_run,
        **files,
    )


# The options that have a meaning together with this one. All others would be ignored.
_OF_DRY_RUN = frozenset({"dry_run", "progress"})
_OF_SAVE_PROFILE = frozenset({"save_profile", "progress"})
_OF_POINT_TO_POINT = frozenset({"operation", "link", "json", "progress"})
_OF_ALLREDUCE = frozenset({"algorithms", "codecs"})


def _refuse_ignored(arguments: argparse.Namespace, operations: list[str]) -> None:
    given, reason = _given(arguments), ""
    ignored: set[str] = set()
    if arguments.dry_run:
        reason, ignored = "--dry-run measures and writes nothing", given - _OF_DRY_RUN
    elif arguments.save_profile:
        reason, ignored = "--save-profile chooses what it measures", given - _OF_SAVE_PROFILE
    elif operations == [POINT_TO_POINT]:
        reason, ignored = f"--operation {POINT_TO_POINT} has no rows", given - _OF_POINT_TO_POINT
    elif "allreduce" not in operations:
        reason, ignored = f"--operation {arguments.operation} includes no allreduce", given & _OF_ALLREDUCE
    if ignored:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(ignored))
        raise ConfigError(f"{reason}; leave out {names}")


_FILES = ("json", "csv", "plot", "save_profile")


def parse_size(text: str) -> int:
    """Convert `4K`, `16M`, `1G` or a plain number to bytes; K is 1024.

    Raises:
        ConfigError: the text is none of these, or 0.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise ConfigError(f"--sizes: {text!r} is not a size; allowed are bytes such as 4096, 4K, 16M or 1G (K is 1024)")
    return int(match[1]) * _UNITS[match[2]]


def _names(kind: str, text: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {kind} {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _quantity(option: str, text: str, convert: Callable[[str], float]) -> float:
    try:
        return convert(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{option}: {error}") from None


def _whole_number(option: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise ConfigError(f"{option} is {text!r}; it must be a whole number from 1 to 999999999")
    return int(text)


def _check_files(files: dict[str, Path | None]) -> None:
    """Fail now: the same fault would otherwise show only after minutes."""
    for name, path in files.items():
        if path is not None and (is_folder(path) or not is_folder(path.absolute().parent)):
            raise ConfigError(f"--{name.replace('_', '-')} {path}: the path is a folder, or its folder does not exist")
    plot = files["plot"]
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {plot}: the name must end in .png, .svg or .pdf")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'mpitrain[plot]'")
