"""Shares by speed, and single samples to batches; what needs no second rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest

from mpitrain.data.samples import Arrays, Batches, Items, random_of, rows, stack
from mpitrain.data.shares import split
from mpitrain.errors import DataError, TreeError
from mpitrain.world.shard import part_of


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 32])
@pytest.mark.parametrize("speed", [1.0, 0.1, 3e5])
def test_equal_speeds_are_equal_parts(size: int, speed: float) -> None:
    for length in (0, 1, 2, size - 1, size, size + 1, 64, 97):
        parts = [part_of(length, rank, size) for rank in range(size)]
        assert split(length, [speed] * size) == [part.stop - part.start for part in parts]


@pytest.mark.parametrize(
    ("length", "speeds", "expected"),
    [
        (64, [4, 2, 1], [37, 18, 9]),
        (70, [400.0, 200.0, 100.0], [40, 20, 10]),
        (7, [1, 2, 4], [1, 2, 4]),
        (3, [1000, 1, 1], [1, 1, 1]),  # one for each
        (10, [1000, 1, 1], [8, 1, 1]),
        (2, [1, 1, 4], [0, 0, 2]),  # fewer than ranks: 2/4 is less than 1/1
        (1, [1, 4], [0, 1]),
        (0, [1, 4], [0, 0]),
    ],
)
def test_split(length: int, speeds: list[float], expected: list[int]) -> None:
    assert split(length, speeds) == expected


def test_no_split_is_done_earlier() -> None:
    """Against all there are."""
    rng = numpy.random.default_rng(0)
    for _ in range(50):
        speeds = rng.uniform(0.2, 5, 3).tolist()
        length = int(rng.integers(12, 25))
        best = min(
            max(a / speeds[0], b / speeds[1], (length - a - b) / speeds[2])
            for a, b in itertools.product(range(length + 1), repeat=2)
            if a + b <= length
        )
        counts = split(length, speeds)
        assert sum(counts) == length
        if min(length * speed / sum(speeds) for speed in speeds) >= 1:  # else the one-for-each rule may cost
            assert max(count / speed for count, speed in zip(counts, speeds, strict=True)) == pytest.approx(best)


def test_stack() -> None:
    samples = [{"x": numpy.full((2, 3), n, "f4"), "y": n, "z": (numpy.float16(n),)} for n in range(4)]
    batch = stack(samples, range(4))
    assert (batch["x"].dtype, batch["x"].shape) == (numpy.float32, (4, 2, 3))
    assert batch["y"].tolist() == [0, 1, 2, 3]
    assert (batch["z"][0].dtype, batch["z"][0].tolist()) == (numpy.float16, [0, 1, 2, 3])
    for sample, row in zip(samples, rows(batch), strict=True):
        numpy.testing.assert_array_equal(row["x"], sample["x"])
        assert (row["y"], row["z"]) == (sample["y"], sample["z"])


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"x": numpy.zeros(3)}, r"sample 12 has \['x'\] float64 \(3,\), sample 10 \['x'\] float64 \(2,\)"),
        ({"x": numpy.zeros(2, "f4")}, r"sample 12 has \['x'\] float32 \(2,\)"),
        ({"y": numpy.zeros(2)}, r"sample 12 has \['y'\]"),
        ({}, "sample 12 has nothing"),
    ],
)
def test_samples_that_are_not_alike(odd: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        stack([{"x": numpy.zeros(2)}, {"x": numpy.ones(2)}, odd], [10, 11, 12])


def test_samples_that_are_no_arrays() -> None:
    with pytest.raises(TreeError, match=r"leaf \['name'\] is a str"):
        stack([{"name": "cat"}], [0])


NUMBERS = numpy.array([4, 0, 3])


@pytest.mark.parametrize(
    "source",
    [
        Arrays((numpy.arange(5) * 10, numpy.arange(5.0))),
        Items([(n * 10, float(n)) for n in range(5)]),
        Batches(type("Table", (), {"__getitem__": lambda _, numbers: (numbers * 10, numbers.astype(float))})()),
    ],
    ids=["arrays", "items", "batches"],
)
def test_sources_give_the_same(source: Any) -> None:
    x, y = source.batch(NUMBERS)
    assert (x.tolist(), y.tolist()) == ([40, 0, 30], [4.0, 0.0, 3.0])
    assert [(int(a), float(b)) for a, b in source.each(NUMBERS)] == [(40, 4.0), (0, 0.0), (30, 3.0)]


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(IndexError) as caught:
        Items([1, 2, 3]).batch(numpy.array([0, 7]))
    assert caught.value.__notes__ == ["in sample 7"]
    with pytest.raises(IndexError) as caught:
        Batches(numpy.zeros(3)).batch(numpy.array([0, 7]))
    assert caught.value.__notes__ == ["in samples 0, 7"]
    few = type("Few", (), {"__getitem__": lambda _, numbers: numbers[:-1]})()
    with pytest.raises(DataError, match="the data set returned 2 samples; it must return 3"):
        Batches(few).batch(NUMBERS)


def test_random_numbers_belong_to_seed_epoch_and_sample() -> None:
    keys = list(itertools.product(range(3), repeat=3))
    draws = {key: random_of(*key).integers(0, 2**62) for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert all(random_of(*key).integers(0, 2**62) == value for key, value in draws.items())
