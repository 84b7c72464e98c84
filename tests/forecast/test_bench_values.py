"""The bench: its options, values whose sums are known, rounds, the table and its picture, and links."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import DTYPES, FLOATS
from mpitrain.errors import ConfigError
from mpitrain.forecast.bench_options import Options, add_arguments, parse_size, read_options, words_of
from mpitrain.forecast.bench_table import COLUMNS, Row, as_csv, header, line, matrix, panels, size_text, tuning_of
from mpitrain.forecast.cluster_profile import busiest, circle_rounds, crossover, nominal_gbit, parse_counters
from mpitrain.forecast.operations import OPERATIONS
from mpitrain.forecast.report import IDEAL, Panel, draw
from mpitrain.forecast.rounds import (
    TILE,
    count_wrong,
    fill,
    ratio,
    real_sum_tile,
    real_tile,
    spread,
    sum_tile,
    tile,
    versions,
    versions_line,
)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def read(*words: str) -> Options:
    return read_options(parsed(*words))


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096", 4096), ("4K", 4096), ("64k", 65536), ("100M", 104857600), ("3G", 3 * 2**30), (" 1M ", 2**20)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0K", "-1", "4X", "K", "1.5M", "4KB", "1e6", "4 K", "²"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; allowed are bytes such as 4096, 4K"):
        parse_size(text)


def test_defaults() -> None:
    options = read()
    assert options.operations == ("allreduce",)
    assert options.sizes_bytes == (4096, 65536, 2**20, 2**24, 100 * 2**20)
    assert (options.dtypes, options.algorithms, options.codecs) == (("float32",), ("auto",), ("none",))
    assert options.rounds is None
    assert options.link_gbit is None
    assert not options.has_all_algorithms


def test_lists_and_numbers() -> None:
    options = read(
        "--operation", "point_to_point,allreduce", "--dtypes=float64,int8", "--algorithms", "ring, native,ring"
    )
    assert options.operations == ("point_to_point", "allreduce")
    assert options.dtypes == ("float64", "int8")
    assert options.algorithms == ("ring", "native")
    options = read("--algorithms", "all", "--rounds", "7", "--time", "0.5s", "--link", "2500Mbit/s", "--sizes", "8,1K")
    assert options.algorithms == tuple(sorted(ALGORITHMS))
    assert options.has_all_algorithms
    assert (options.rounds, options.seconds, options.link_gbit, options.sizes_bytes) == (7, 0.5, 2.5, (8, 1024))


def test_a_folder_of_another_host() -> None:
    """Rank 0 alone writes the files: `mpitrain plan --hosts` makes a folder on its own host only."""
    options = read_options(parsed("--save-profile", "/nowhere/at/all.json"), writes=False)
    assert options.save_profile == Path("/nowhere/at/all.json")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--operation alreduce", "there is no operation 'alreduce'; known: allreduce, .*point_to_point"),
        ("--algorithms auto,rign", "there is no algorithm 'rign'; known: auto, .*native, .*ring"),
        ("--dtypes complex64", "there is no dtype 'complex64'; known: float16, float32"),
        ("--codecs zip", "there is no codec 'zip'; known: none"),
        ("--codecs none,power_sgd", "there is no codec 'power_sgd'; known: none"),
        ("--codecs top_k:2", "the density is '2'; allowed is"),
        ("--codecs int8:2", "int8 takes no setting"),
        ("--sizes 4K,,1M", "'' is not a size"),
        ("--sizes 4 --dtypes float32,float64", "4 bytes is less than one element of float32,float64"),
        ("--rounds 0", "--rounds is '0'; it must be a whole number from 1 to 999999999"),
        ("--rounds 2.5", "--rounds is '2.5'; it must be a whole number from 1 to 999999999"),
        ("--time nan", "--time: 'nan' is not a number with a unit, as in 60s; units: us, ms, s"),
        ("--time 1e7s", r"--time: '1e7s' is not from 0.001s to 1e\+06s"),
        ("--link fast", "--link: 'fast' is not a number with a unit, as in 1Gbit/s or 100Mbit/s"),
        ("--json /nowhere/at/all.json", "all.json: the path is a folder, or its folder does not exist"),
        ("--save-profile /", "--save-profile /: the path is a folder"),
        ("--plot picture.bmp", r"must end in .png, .svg or .pdf"),
        ("--operation point_to_point --plot r.png", "--operation point_to_point has no rows; leave out --plot"),
        ("--operation point_to_point --csv r.csv --sizes 4K", "has no rows; leave out --csv, --sizes"),
        ("--operation point_to_point --algorithms ring --codecs bf16", "leave out --algorithms, --codecs"),
        ("--operation point_to_point --dtypes int8 --rounds 3 --time 1s", "leave out --dtypes, --rounds, --time"),
        ("--codecs bf16 --algorithms ring", "--algorithms ring applies to sums without .* use --codecs none,bf16"),
        ("--codecs bf16,int8 --algorithms all", "--algorithms all applies to .* use --codecs none,bf16,int8"),
        ("--operation allgather --codecs bf16", "--operation allgather includes no allreduce; leave out --codecs"),
        ("--operation broadcast,point_to_point --algorithms ring", "includes no allreduce; leave out --algorithms"),
        ("--save-profile p.json --json b.json", "--save-profile chooses what it measures; leave out --json"),
        ("--save-profile p.json --sizes 4K --link 1Gbit/s", "leave out --link, --sizes"),
        ("--dry-run --json b.json", "--dry-run measures and writes nothing; leave out --json"),
        ("--dry-run --save-profile p.json", "--dry-run measures and writes nothing; leave out --save-profile"),
        ("--dry-run --algorithms ring", "leave out --algorithms"),
    ],
)
def test_what_is_refused_or_would_be_ignored(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--codecs none,bf16 --algorithms ring",
        "--codecs bf16 --algorithms auto",
        "--operation allgather,allreduce --codecs bf16",
        "--operation allgather,point_to_point --csv r.csv --sizes 4K",
        "--operation point_to_point --json r.json --link 1Gbit/s --progress",
        "--save-profile p.json --progress",
        "--dry-run --progress",
    ],
)
def test_what_goes_together(words: str) -> None:
    read(*words.split())


def test_the_extra_is_named_where_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which is not installed: pip install 'mpitrain\[plot\]'"):
        read("--plot", "picture.png")


def test_the_ranks_get_the_same_options(tmp_path: Path) -> None:
    words = ["--sizes", "4K", "--rounds", "2", "--json", f"{tmp_path}/a file.json", "--progress", "--link=1Gbit/s"]
    assert read(*words_of(parsed(*words))) == read(*words)
    assert words_of(parsed()) == []


SIZES = (1, 2, 3, 4, 7, 32, 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_exact_in_every_order(size: int, dtype: numpy.dtype) -> None:
    tiles = [tile(rank, size, dtype) for rank in range(size)]
    forwards, backwards = numpy.zeros(TILE, dtype), numpy.zeros(TILE, dtype)
    for values in tiles:
        forwards += values
    for values in reversed(tiles):
        backwards += values
    assert forwards.tobytes() == backwards.tobytes() == sum_tile(size, dtype).tobytes()
    if dtype in FLOATS:  # integers of few bits may wrap
        exact = sum(values.astype(numpy.int64) for values in tiles)
        numpy.testing.assert_array_equal(forwards.astype(numpy.int64), exact)


def test_ranks_and_places_differ() -> None:
    first, second = (tile(rank, 4, numpy.dtype("float32")) for rank in (0, 1))
    assert (first != second).mean() > 0.9
    assert (first[1:] != first[:-1]).mean() > 0.9
    assert TILE % 2 and all(TILE % number for number in range(3, 256, 2))


@pytest.mark.parametrize("length", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE + 17])
def test_filled_and_counted(length: int) -> None:
    values = tile(0, 2, numpy.dtype("float32"))
    flat = numpy.full(length, numpy.nan, numpy.float32)
    assert count_wrong(flat, values) == length
    fill([flat], values)
    assert (flat == numpy.resize(values, length)).all()
    assert count_wrong(flat, values) == 0
    for place in {0, length // 2, length - 1} if length else ():
        wrong = flat.copy()
        wrong[place] += 1
        assert count_wrong(wrong, values) == 1
    # A segment that belongs one power of two further on is found.
    if length > 2 * 4096:
        assert count_wrong(numpy.roll(flat, 4096), values) > 0.8 * length


def test_bits_are_compared() -> None:
    zeros = numpy.zeros(TILE, numpy.float32)
    assert count_wrong(-zeros[:5], zeros) == 5
    nothing = numpy.full(5, numpy.nan, numpy.float32)
    assert count_wrong(nothing, zeros, tolerance=1.0) == 5


def test_a_tolerance() -> None:
    values, expected = real_tile(0), real_sum_tile(1)
    assert values.dtype == numpy.float32
    assert -1 <= values.min() < -0.9
    assert 0.9 < values.max() <= 1
    assert count_wrong(values, expected, 1e-9) == 0
    assert count_wrong(values + numpy.float32(0.01), expected, 0.005) == TILE
    assert count_wrong(values + numpy.float32(0.01), expected, 0.02) == 0
    numpy.testing.assert_array_equal(real_sum_tile(2), values.astype(float) + real_tile(1).astype(float))


def test_spread() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([1.0, 2.0]) == pytest.approx((1.5, 1.1, 1.9))
    middle, low, high = spread([float(number) for number in range(101)])
    assert (middle, low, high) == pytest.approx((50.0, 10.0, 90.0))


def test_ratios_are_of_rounds() -> None:
    """Machines change their speed: here everything is ten times slower in the last round."""
    seconds = {"a": [1.0, 1.1, 10.0], "b": [2.0, 2.2, 20.0]}
    assert ratio(seconds, "a", "b") == pytest.approx((0.5, 0.5, 0.5))


def test_versions() -> None:
    found = versions("ml_dtypes")
    assert {"mpitrain", "Python", "mpi4py", "numpy", "ml_dtypes", "MPI", "kernel"} == set(found)
    assert all(text and text == " ".join(text.split()) for text in found.values())
    assert found["MPI"] in versions_line()


@pytest.mark.parametrize("size", range(1, 12))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(size: int) -> None:
    rounds = circle_rounds(size)
    assert len(rounds) == (size - 1 if size % 2 == 0 else size) if size > 1 else rounds in ([], [[]])
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == size * (size - 1) // 2
    assert all(len(pair) == 2 for pair in met)
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


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


def test_a_name_has_one_colour_in_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a panel has other lines; the ideal line is black, and the legend is below the panels."""
    figure_module = pytest.importorskip("matplotlib.figure")
    figures: list[Any] = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    a, b = (1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0)
    grid = [[Panel("x", {f"{IDEAL}, by hand": [a, b], "ring": [a, b]}), Panel("y", {"mpi": [a, b], "ring": [a, b]})]]
    draw(tmp_path / "a.png", "a title", "ranks", grid)
    [figure] = figures
    first, second = ([line.get_color() for line in axes.lines] for axes in figure.axes)
    assert first[0] == "black" and second[1] == first[1] != second[0]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ideal, by hand", "ring", "mpi"]
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_tuning() -> None:
    tuned = {
        "FI_PROVIDER": "tcp",
        "MALLOC_MMAP_THRESHOLD_": "1",
        "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring",
        "OMPI_MCA_btl_tcp_flags": "send",
        "UCX_RNDV_THRESH": "inf",
    }
    launcher = {"OMPI_MCA_initial_wdir": "/tmp", "OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0"}
    assert (
        tuning_of(tuned | launcher | {"HOME": "/root", "OMP_NUM_THREADS": "1", "MPITRAIN_ALGORITHM": "ring"}) == tuned
    )
    assert tuning_of(launcher) == {}


@pytest.mark.parametrize(
    ("faster", "limit"),
    [
        ([False, False, False], 0),
        ([True, False, False], 8192),
        ([True, True, False], 32768),
        ([True, True, True], 131072),
        ([False, True, False], 32768),  # what disturbed the first one
    ],
)
def test_crossover(faster: list[bool], limit: int) -> None:
    assert crossover(dict(zip((4096, 16384, 65536), faster, strict=True))) == limit


BEFORE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 6300021   20100    0    0    0     0          0         0  6300021   20100    0    0    0     0       0
  eth0:12345678   10000    0    0    0     0          0         0 87654321   20000    0    0    0     0       0
enp3s0:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0
"""


def test_counters() -> None:
    found = parse_counters(BEFORE)
    assert found == {"lo": (6300021, 6300021), "eth0": (12345678, 87654321), "enp3s0": (0, 0)}


def test_the_one_that_moved() -> None:
    before = {"lo": (0, 0), "eth0": (5, 7), "eth1": (0, 0)}
    assert busiest(before, {"lo": (9**9, 9**9), "eth0": (2**21, 2**21 + 100), "eth1": (400, 300)}) == "eth0"
    # A bond sends what its two parts send together.
    assert busiest({"bond0": (0, 0), "eth0": (0, 0)}, {"bond0": (0, 2**21), "eth0": (0, 2**20)}) == "bond0"
    assert busiest(before, {"lo": (9**9, 9**9), "eth0": (500, 700), "eth1": (0, 0)}) == ""
    assert busiest({}, {"eth0": (9**9, 9**9)}) == ""  # it has come up in between
    assert busiest({}, {}) == ""


def interface(folder: Path, name: str, speed: str | None, *, hardware: bool, lower: tuple[str, ...] = ()) -> None:
    (folder / name).mkdir()
    if speed is not None:
        (folder / name / "speed").write_text(f"{speed}\n")
    if hardware:
        (folder / name / "device").mkdir()
    for other in lower:
        (folder / name / f"lower_{other}").symlink_to(folder / other)


@pytest.mark.parametrize(
    ("speed", "gbit"), [("1000", 1.0), ("2500", 2.5), ("100", 0.1), ("-1", None), ("", None), (None, None)]
)
def test_the_rate_of_hardware(tmp_path: Path, speed: str | None, gbit: float | None) -> None:
    interface(tmp_path, "eth0", speed, hardware=True)
    assert nominal_gbit("eth0", tmp_path) == gbit


def test_the_rate_of_what_stands_on_others(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "1000", hardware=True)
    interface(tmp_path, "eth1", "1000", hardware=True)
    interface(tmp_path, "veth0", "10000", hardware=False)  # as the kernel says of every such pair
    interface(tmp_path, "bond0", "2000", hardware=False, lower=("eth0", "eth1"))
    interface(tmp_path, "bond0.5", "2000", hardware=False, lower=("bond0",))
    interface(tmp_path, "br0", "10000", hardware=False, lower=("eth0", "veth0"))
    assert [nominal_gbit(name, tmp_path) for name in ("bond0", "bond0.5", "veth0", "br0")] == [2.0, 2.0, None, None]
