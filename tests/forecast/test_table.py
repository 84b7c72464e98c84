"""Rows, the table, CSV, and the picture."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest

from mpitrain.forecast.bench_table import COLUMNS, Row, as_csv, header, line, matrix, panels, size_text
from mpitrain.forecast.operations import OPERATIONS
from mpitrain.forecast.report import draw

ROW = Row(
    size_bytes=16777216,
    count=4194304,
    operation="allreduce",
    dtype="float32",
    algorithm="ring",
    codec="none",
    rounds=9,
    time_us=140321.5,
    p10_us=139999.0,
    p90_us=141000.25,
    algbw=0.11956,
    busbw=0.11956,
    wrong=0,
    bound_us=134217.7,
    share_of_bound=0.9565,
    link_bytes=16802124,
    link_multiple=1.0015,
    cores=0.0625,
    ratio_to_mpi=0.515,
)
ALONE = dataclasses.replace(
    ROW, bound_us=None, share_of_bound=None, link_bytes=None, link_multiple=None, ratio_to_mpi=None
)


def test_a_row() -> None:
    assert line(ROW, True).split() == [
        *("16777216", "4194304", "float32", "allreduce", "ring", "none", "140322", "[139999-141000]", "0.120", "0.120"),
        *("0", "134218", "95.7%", "16802124", "1.00", "0.06", "0.52"),
    ]
    assert line(ALONE, True).split()[11:] == ["-", "-", "-", "-", "0.06", "-"]
    assert line(ALONE, False).split()[10:] == ["0", "0.06", "-"]


@pytest.mark.parametrize("several_nodes", [True, False])
def test_columns_stand_under_their_titles(several_nodes: bool) -> None:
    titles, units = header(several_nodes)
    row = line(ROW, several_nodes)
    assert titles.startswith("#") and units.startswith("#")
    end = 0
    for column in COLUMNS:
        if column.is_of_links and not several_nodes:
            assert column.title not in titles
            continue
        end += column.width
        assert titles[:end].endswith(column.title)
        assert row[:end].endswith(column.text(ROW))


def test_a_long_name_keeps_its_distance() -> None:
    row = dataclasses.replace(ROW, algorithm="a_name_that_is_longer_than_its_column")
    assert " a_name_that_is_longer_than_its_column " in line(row, True)


def test_csv_has_everything() -> None:
    (read,) = csv.DictReader(io.StringIO(as_csv([ALONE])))
    assert list(read) == [field.name for field in dataclasses.fields(Row)]
    assert read["time_us"] == "140321.5"
    assert read["bound_us"] == ""


def test_a_matrix() -> None:
    assert matrix("latency", ["a", "node2"], [[0, 1.25], [10.5, 0]], ".1f") == [
        "# latency",
        "            0     1",
        "0 a             1.2",
        "1 node2  10.5",
    ]


def test_factors() -> None:
    """The factors are those of PERFORMANCE.md of nccl-tests."""
    allreduce = OPERATIONS["allreduce"]
    assert [allreduce.busbw_factor(size) for size in (1, 2, 4)] == [0.0, 1.0, 1.5]
    # A node must send and receive 2 (n - 1) / n, however many ranks it has.
    assert [allreduce.least(nodes) for nodes in ([1, 1], [2, 2], [1, 3], [1, 1, 1, 1])] == [1.0, 1.0, 1.0, 1.5]


def test_factors_of_the_others() -> None:
    for name in ("reduce_scatter", "allgather"):
        operation = OPERATIONS[name]
        assert [operation.busbw_factor(size) for size in (1, 2, 4)] == [0.0, 0.5, 0.75]
        # One node has three of the four parts, and sends or receives them all.
        assert [operation.least(nodes) for nodes in ([1, 1], [2, 2], [1, 3], [1, 1, 1, 1])] == [0.5, 0.5, 0.75, 0.75]
    assert (OPERATIONS["broadcast"].busbw_factor(4), OPERATIONS["broadcast"].least([1, 1])) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1"), (1000, "1000"), (4096, "4K"), (2**20, "1M"), (1.5 * 2**20, "1.5M"), (2**31, "2G")]
)
def test_size_texts(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = dataclasses.replace(ROW, size_bytes=4096, time_us=90.0, p10_us=80.0, p90_us=100.0, bound_us=30.0)
    other = dataclasses.replace(ROW, dtype="float64")
    for name, begin in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        draw(tmp_path / name, "a title", "size (bytes)", panels([ROW, small, other]), size_text)
        content = (tmp_path / name).read_bytes()
        assert content.startswith(begin)
        assert len(content) > 5000
