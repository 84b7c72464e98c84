"""The bench on real ranks: what it counts as wrong, what it compares, what it measures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from mpi4py import MPI

from mpitrain import World, collectives
from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Sequential
from mpitrain.allreduce.registry import Entry
from mpitrain.compression import CODECS
from mpitrain.errors import ConfigError
from mpitrain.forecast.bench import sweep
from mpitrain.forecast.bench_options import Options, add_arguments, read_options
from mpitrain.forecast.bench_table import Row, as_json
from mpitrain.forecast.cluster_profile import (
    Pairs,
    find_link,
    measure_cluster,
    measure_pairs,
    native_below,
    save_profile,
)
from mpitrain.forecast.operations import OPERATIONS
from mpitrain.forecast.rounds import Variant, measure
from mpitrain.profile import fingerprint, from_json, library_name
from tests.ranks.common import skip_alone

from .placements import placed


def options_of(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_options(parser.parse_args(words))


def rows_of(world: World, *words: str) -> list[Row]:
    return [row for cell in sweep(world, options_of(*words), find_link(world)) for row in cell]


def test_every_algorithm_is_right(world: World) -> None:
    rows = rows_of(world, "--sizes", "8,300001", "--dtypes=float32,bfloat16", "--algorithms=all", "--rounds=1")
    assert len(set(world.allgather(tuple(rows)))) == 1
    for row in rows:
        assert (row.wrong, row.rounds) == (0, 1), row
        assert 0 < row.p10_us <= row.time_us <= row.p90_us
        assert row.algbw == pytest.approx(row.size_bytes / row.time_us / 1e3)
        assert row.busbw == pytest.approx(row.algbw * 2 * (world.size - 1) / world.size)
        assert (row.bound_us, row.link_bytes) == (None, None)  # one node
        assert (row.ratio_to_mpi is None) == (row.dtype == "bfloat16")
    names = {row.algorithm for row in rows}
    assert {"mpi", "auto", "native", "ring"} <= names <= {"mpi", *ALGORITHMS}
    assert {row.ratio_to_mpi for row in rows if row.algorithm == "mpi"} == {1.0}
    assert [row.size_bytes for row in rows if (row.algorithm, row.dtype) == ("mpi", "float32")] == [8, 300000]


OTHERS = sorted(set(OPERATIONS) - {"allreduce"})


@pytest.mark.parametrize("operation", OTHERS)
def test_other_operations_are_right(world: World, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they get wrong is counted: one element in each of a round and 2 warm-up rounds."""
    words = ("--operation", operation, "--sizes", "64,300001", "--dtypes=float32,bfloat16", "--rounds=1")
    rows = rows_of(world, *words)
    assert {row.algorithm for row in rows} == {"mpi", "mpitrain"}
    for row in rows:
        assert row.wrong == 0, row
        assert row.busbw == pytest.approx(row.algbw * OPERATIONS[operation].busbw_factor(world.size))
        itemsize = 4 if row.dtype == "float32" else 2
        parts = world.size if OPERATIONS[operation].is_split else 1
        assert row.count * parts * itemsize == row.size_bytes
    right = getattr(collectives, operation)

    def off(world: World, array: numpy.ndarray) -> SimpleNamespace:
        result = right(world, array).wait()
        result[-1] += world.rank == world.size - 1
        return SimpleNamespace(wait=lambda: result)

    monkeypatch.setattr(collectives, operation, off)
    rows = rows_of(world, "--operation", operation, "--sizes", "1M", "--rounds", "1")
    assert {row.algorithm: row.wrong for row in rows} == {"mpi": 0, "mpitrain": 3}


def test_what_is_wrong_is_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm adds everything up, but for the last element on rank 0. One refuses this world."""

    def make(world: World) -> Sequential:
        def steps(flat: numpy.ndarray, *_: object) -> Iterator[None]:
            last = flat[-1]
            world.comm.Allreduce(flat.copy(), flat)
            flat[-1] = last + 1000 if world.rank == 0 else flat[-1]
            return
            yield

        return Sequential(world, "broken", steps)

    skip_alone(world)
    monkeypatch.setitem(ALGORITHMS, "broken", Entry(make))
    right, wrong = rows_of(world, "--sizes", "1M", "--algorithms", "broken", "--rounds", "3")
    # One wrong element in each of 3 rounds and 2 warm-up rounds. Buffers are filled anew: sums of sums would grow.
    assert (right.algorithm, right.wrong, wrong.algorithm, wrong.wrong) == ("mpi", 0, "broken", 5)


def test_variants_take_turns_and_the_slowest_rank_counts(world: World) -> None:
    order: list[str] = []

    def variant(name: str, calls: int) -> Variant:
        def work() -> None:
            order.append(name)
            if world.rank == world.size - 1:
                time.sleep(0.02)

        return Variant(work, lambda: order.append(f"before {name}"), lambda: world.rank, calls=calls)

    measured = measure(world, {"a": variant("a", 1), "b": variant("b", 10)}, 3)
    assert order == [f"{when}{name}" for name in "abbaab" for when in ("before ", "")]
    assert len(set(world.allgather(tuple(measured["a"].seconds)))) == 1
    assert min(measured["a"].seconds) >= 0.02
    assert min(measured["b"].seconds) < min(measured["a"].seconds)  # ten calls share the time of a run
    assert measured["a"].wrong == 3 * sum(range(world.size))
    assert {len(its.seconds) for its in measured.values()} == {3}


@pytest.fixture(scope="module")
def pairs(world: World) -> Pairs:
    return measure_pairs(world.comm)


@pytest.fixture
def less_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the numbers do not matter here, so they may be less exact."""
    for name, value in {"_BLOCK_BYTES": 2**20, "_CODEC_BYTES": 2**18, "_MEMORY_ROUNDS": 3, "_LIMIT_ROUNDS": 5}.items():
        monkeypatch.setattr(f"mpitrain.forecast.cluster_profile.{name}", value)


def test_a_profile(world: World, shared: Path, less_is_measured: None) -> None:
    measured = measure_cluster(world)
    assert len(set(world.allgather(json.dumps(measured)))) == 1
    assert measured["latency_between_nodes_us"] is None
    for name in ("copy_bytes_per_second", "add_bytes_per_second"):
        assert measured[name] > 0
    assert set(measured["codecs"]) == set(CODECS)
    assert all(its["add_bytes_per_second"] > 0 for its in measured["codecs"].values())
    if world.is_root:
        save_profile(shared / "profile.json", world, measured)
        read = json.loads((shared / "profile.json").read_text())
        assert read["measured"] == measured
        here = fingerprint(world.hosts, world.node_ranks, library_name(MPI.Get_library_version()))
        assert here["ranks_per_node"] == [world.size]
        profile = from_json(json.dumps(read), "profile.json", here)
        assert profile.add_bytes_per_second == measured["add_bytes_per_second"]
        assert profile.native_below_bytes == measured["native_below_bytes"]
        assert profile.is_measured
        assert {name for name, rate in profile.codecs if rate > 0} == set(CODECS)
        assert [path.name for path in shared.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(("slow", "limit"), [("native", 0), ("shared_memory", 2 * 2**20)])
def test_the_limit_of_native_is_measured(
    world: World, slow: str, limit: int, less_is_measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two algorithms is made slower than the other can be."""
    skip_alone(world)
    right = ALGORITHMS[slow].make

    def make(world: World) -> Sequential:
        made = right(world)
        assert isinstance(made, Sequential)

        def steps(flat: numpy.ndarray, *_: object) -> Iterator[None]:
            time.sleep(0.1 + 0.02 * flat.nbytes / 2**20)
            yield from made.steps(flat, None)

        return Sequential(world, slow, steps)

    monkeypatch.setitem(ALGORITHMS, slow, Entry(make))
    assert native_below(world) == limit


def test_the_limit_of_native_between_nodes(world: World, less_is_measured: None) -> None:
    skip_alone(world)
    limit = native_below(placed(world, "alone on each node"))
    assert limit in (0, *(2 * 4**exponent * 2**12 for exponent in range(5)))
    assert len(set(world.allgather(limit))) == 1


def test_json_and_pairs(world: World, pairs: Pairs) -> None:
    for table in pairs:
        values = numpy.array(table)
        assert ((values > 0) == ~numpy.eye(world.size, dtype=bool)).all()
    assert len(set(world.allgather(json.dumps(pairs)))) == 1
    rows = rows_of(world, "--sizes", "4K", "--rounds", "1")
    read = json.loads(as_json(world, find_link(world), rows, pairs, list(world.hosts)))
    assert [Row(**row) for row in read["rows"]] == rows
    assert [field.name for field in dataclasses.fields(Row)] == list(read["rows"][0])
    assert (read["schema"], read["hosts"], read["ranks_per_node"]) == (1, list(world.hosts), [world.size])
    assert {"mpitrain", "Python", "numpy", "mpi4py", "MPI", "kernel"} <= set(read["versions"])
    assert len(read["point_to_point"]["latency_us"]) == world.size


def test_a_codec_on_one_node(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    line = "# compressed: all ranks are on one node, so nothing is compressed\n"
    rows = rows_of(world, "--sizes", "4K", "--rounds", "1", "--codecs", "none,bf16,int8")
    assert {row.codec for row in rows} == {"none", "bf16", "int8"}
    assert capsys.readouterr().out.count(line) == world.is_root
    rows_of(world, "--sizes", "4K", "--rounds", "1")
    assert line not in capsys.readouterr().out


def test_an_algorithm_that_refuses_this_world(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(world: World) -> Sequential:
        raise ConfigError("not for this world")

    monkeypatch.setitem(ALGORITHMS, "picky", Entry(refuse))
    with pytest.raises(ConfigError, match="not for this world"):
        rows_of(world, "--sizes", "4K", "--rounds", "1", "--algorithms", "picky")
    rows = rows_of(world, "--sizes", "4K", "--rounds", "1", "--algorithms", "all")
    assert "picky" not in {row.algorithm for row in rows}
    assert ("# picky is left out: not for this world" in capsys.readouterr().out) == world.is_root
