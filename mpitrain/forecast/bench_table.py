"""The rows of a result: the table with nccl-tests' columns below lines about the job, JSON, CSV, and a picture."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mpitrain.forecast.cluster_profile import Link, Pairs
from mpitrain.forecast.report import IDEAL, Panel, Point
from mpitrain.forecast.rounds import versions, versions_line
from mpitrain.launch.tuning import SETTINGS
from mpitrain.world.world import World


@dataclass(frozen=True)
class Row:
    """One variant of one cell. Times: the slowest rank's, in microseconds. Bandwidths: GB/s (1e9), as in nccl-tests.

    Attributes:
        size_bytes: the size of the whole buffer.
        count: the number of elements; of one rank's part if the buffer consists of the ranks' parts.
        operation, dtype, algorithm, codec: what was run.
        rounds: the number of timed rounds.
        time_us, p10_us, p90_us: median over rounds, 10th and 90th percentile.
        algbw, busbw: size / time, and the same times the operation's factor.
        wrong: the number of wrong elements, over all ranks and rounds.
        bound_us: the time that the uncompressed bytes that must cross a link take at its nominal rate; None on one
            node, or if the rate is unknown.
        share_of_bound: bound / time.
        link_bytes: the bytes that crossed the interface of the busiest node in its busier direction, median; None on
            one node.
        link_multiple: link_bytes as a multiple of the least possible number without a codec.
        cores: CPU seconds per second, mean over ranks.
        ratio_to_mpi: median of the rounds' time / mpi's time; None if mpi cannot do the operation.
    """

    size_bytes: int
    count: int
    operation: str
    dtype: str
    algorithm: str
    codec: str
    rounds: int
    time_us: float
    p10_us: float
    p90_us: float
    algbw: float
    busbw: float
    wrong: int
    bound_us: float | None
    share_of_bound: float | None
    link_bytes: int | None
    link_multiple: float | None
    cores: float
    ratio_to_mpi: float | None


@dataclass(frozen=True)
class Column:
    """A column of the table for people."""

    title: str
    unit: str
    width: int
    text: Callable[[Row], str]
    is_of_links: bool = False  # shown only if there are several nodes


def _or_dash(form: str, value: float | None) -> str:
    return "-" if value is None else format(value, form)


def _time(us: float) -> str:
    """Format a time with about four digits, whatever its magnitude."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"


COLUMNS = (
    Column("size", "(B)", 11, lambda row: str(row.size_bytes)),
    Column("count", "", 11, lambda row: str(row.count)),
    Column("type", "", 9, lambda row: row.dtype),
    Column("op", "", 15, lambda row: row.operation),
    Column("algorithm", "", 19, lambda row: row.algorithm),
    Column("codec", "", 6, lambda row: row.codec),
    Column("time", "(us)", 9, lambda row: _time(row.time_us)),
    Column("spread", "(us)", 21, lambda row: f"[{_time(row.p10_us)}-{_time(row.p90_us)}]"),
    Column("algbw", "(GB/s)", 8, lambda row: f"{row.algbw:.3f}"),
    Column("busbw", "(GB/s)", 8, lambda row: f"{row.busbw:.3f}"),
    Column("#wrong", "", 7, lambda row: str(row.wrong)),
    Column("bound", "(us)", 9, lambda row: "-" if row.bound_us is None else _time(row.bound_us), True),
    Column("of bound", "", 9, lambda row: _or_dash(".1%", row.share_of_bound), True),
    Column("NIC bytes", "(B)", 11, lambda row: _or_dash("d", row.link_bytes), True),
    Column("of least", "", 9, lambda row: _or_dash(".2f", row.link_multiple), True),
    Column("cores", "/rank", 6, lambda row: f"{row.cores:.2f}"),
    Column("/ mpi", "", 7, lambda row: _or_dash(".2f", row.ratio_to_mpi)),
)


def header(several_nodes: bool) -> list[str]:
    """Return the two lines above the rows: titles and units."""
    columns = _shown(several_nodes)
    lines = ["".join(getattr(column, part).rjust(column.width) for column in columns) for part in ("title", "unit")]
    return [f"#{line[1:]}".rstrip() for line in lines]


def line(row: Row, several_nodes: bool) -> str:
    """A row."""
    # A text that is too long for its column keeps one space before it.
    return "".join(" " + column.text(row).rjust(column.width - 1) for column in _shown(several_nodes))


def _shown(several_nodes: bool) -> list[Column]:
    return [column for column in COLUMNS if several_nodes or not column.is_of_links]


def matrix(title: str, names: list[str], values: list[list[float]], form: str) -> list[str]:
    """Return a table of every ordered pair, from the row's member to the column's; the diagonal is empty."""
    labels = [str(number) for number in range(len(names))]
    cells = [
        ["" if row == column else format(value, form) for column, value in enumerate(line)]
        for row, line in enumerate(values)
    ]
    width = max(len(text) for text in [*labels, *(cell for line in cells for cell in line)]) + 2
    first = max(len(f"{label} {name}") for label, name in zip(labels, names, strict=True))
    lines = [f"# {title}", " " * first + "".join(label.rjust(width) for label in labels)]
    for label, name, row in zip(labels, names, cells, strict=True):
        lines.append(f"{label} {name}".ljust(first) + "".join(cell.rjust(width) for cell in row))
    return [line.rstrip() for line in lines]


def as_csv(rows: Iterable[Row]) -> str:
    """Return all fields of all rows, with their names in the first line; a missing value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


SCHEMA = 1


# The variables of the MPI libraries and of what they use. Open MPI's mpiexec sets others itself, which tune nothing.
_PREFIXES = ("FI_", "I_MPI_ADJUST_", "I_MPI_FABRICS", "I_MPI_OFI_", "MPIR_CVAR_", "OMPI_MCA_", "UCX_")
_OF_LAUNCHER = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs")


def tuning_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tune MPI's own calls, also those that `mpitrain run` has set."""
    known = {one.name for one in SETTINGS}
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in known or (name.startswith(_PREFIXES) and name not in _OF_LAUNCHER)
    }


def preamble(world: World, link: Link) -> list[str]:
    """Return lines about versions, ranks, link and tuning."""
    tuned = " ".join(f"{name}={value}" for name, value in tuning_of(os.environ).items())
    return [f"# {versions_line()}", f"# {_ranks(world)}", f"# {link.about}", f"# tuning: {tuned or 'none'}"]


def as_json(
    world: World, link: Link, rows: Sequence[Row], pairs: Pairs | None, names: Sequence[str], device: str = "host"
) -> str:
    """Return the whole result. `names` are the members of the pairs; `device` is the place of the buffers."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": versions(),
        "hosts": list(world.hosts),
        "ranks_per_node": [world.node_ranks.count(node) for node in range(world.num_nodes)],
        "tuning": tuning_of(os.environ),
        "device": device,
        "link": {"about": link.about, "gbit": link.gbit},
        "rows": [asdict(row) for row in rows],
        "point_to_point": None,
    }
    if pairs is not None:
        rates = [[rate / 1e9 for rate in row] for row in pairs.bytes_per_second]
        document["point_to_point"] = {"names": list(names), "latency_us": pairs.latency_us, "gb_per_second": rates}
    return json.dumps(document, indent=2) + "\n"


def panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Return time and bus bandwidth over size, in a row for each operation and dtype."""
    result = []
    for operation, dtype in dict.fromkeys((row.operation, row.dtype) for row in rows):
        times: dict[str, list[Point]] = {}
        bandwidths: dict[str, list[Point]] = {}
        bounds: list[Point] = []
        for row in [row for row in rows if (row.operation, row.dtype) == (operation, dtype)]:
            name = row.algorithm if row.codec == "none" else f"{row.algorithm} {row.codec}"
            times.setdefault(name, []).append((row.size_bytes, row.p10_us, row.time_us, row.p90_us))
            bandwidths.setdefault(name, []).append((row.size_bytes, row.busbw, row.busbw, row.busbw))
            if row.bound_us is not None:
                bounds.append((row.size_bytes, row.bound_us, row.bound_us, row.bound_us))
        if bounds:
            times[f"{IDEAL}: the bound of the link"] = bounds
        title = f"{operation} {dtype}"
        result.append(
            [Panel("time (us), p10 to p90", times, 10, title), Panel("busbw (GB/s)", bandwidths, title=title)]
        )
    return result


def size_text(size: float) -> str:
    """Format 4096 as 4K, as --sizes accepts it."""
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:g}{letter}"
    return f"{size:g}"


def _ranks(world: World) -> str:
    if world.num_nodes == 1:
        return f"{world.size} ranks on {world.host}"
    nodes = range(world.num_nodes)
    hosts = [world.hosts[world.node_ranks.index(node)] for node in nodes]
    numbers = [world.node_ranks.count(node) for node in nodes]
    if len(set(numbers)) == 1:
        return f"{world.size} ranks on {len(hosts)} nodes, {numbers[0]} on each: {', '.join(hosts)}"
    return f"{world.size} ranks: " + ", ".join(
        f"{number} on {host}" for number, host in zip(numbers, hosts, strict=True)
    )
