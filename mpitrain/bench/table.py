"""The rows of a result, and the table with nccl-tests' columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields


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
