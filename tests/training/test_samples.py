"""The order of samples, shares by speed, samples to batches, and Ctrl-C while a batch is read ahead."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
import tracemalloc
from typing import Any

import numpy
import pytest

from mpitrain.data.order import _BLOCK, _ROUNDS, Order, permuted
from mpitrain.data.prefetch import Prefetch
from mpitrain.data.samples import Arrays, Batches, Items, random_of, rows, stack
from mpitrain.data.shares import split
from mpitrain.errors import DataError, TreeError
from mpitrain.world.shard import part_of

SIZES = sorted(
    {*range(1, 40), 97, 101, 65537, 100003} | {2**k + d for k in range(1, 17) for d in (-1, 0, 1) if 2**k + d > 0}
)


def by_hand(place: int, count: int, seed: tuple[int, ...]) -> int:
    """The same in Python's integers, one place at a time."""
    keys = [int(key) for key in numpy.random.SeedSequence(seed).generate_state(_ROUNDS, numpy.uint64)]
    bits = (count - 1).bit_length()
    low_bits = bits // 2

    def mixed(value: int, key: int) -> int:
        z = (value + key) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    while True:
        high, low = place >> low_bits, place % 2**low_bits
        for number, key in enumerate(keys):
            if number % 2:
                low ^= mixed(high, key) % 2**low_bits
            else:
                high ^= mixed(low, key) % 2 ** (bits - low_bits)
        place = high << low_bits | low
        if place < count:
            return place


@pytest.mark.parametrize("count", SIZES)
def test_every_sample_once(count: int) -> None:
    found = permuted(numpy.arange(count), count, (3, 5))
    assert found.dtype == numpy.int64
    numpy.testing.assert_array_equal(numpy.sort(found), numpy.arange(count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 31, 10**12, 2**62 + 1])
def test_as_by_hand(count: int) -> None:
    places = sorted({0, 1 % count, 2 % count, count // 2, count - 1})
    for epoch in range(3):
        expected = [by_hand(place, count, (7, epoch)) for place in places]
        assert permuted(numpy.array(places), count, (7, epoch)).tolist() == expected


def test_the_example_of_the_docstring() -> None:
    assert permuted(numpy.arange(5), 5, (0, 2)).tolist() == [2, 0, 3, 1, 4]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {permuted(numpy.arange(50), 50, (seed, epoch)).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def chi_squared(counts: numpy.ndarray) -> float:
    """Against equal counts, by its degrees of freedom: about 1, with a deviation of sqrt(2 / freedom)."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_orders_are_equally_likely(count: int) -> None:
    every = {order: number for number, order in enumerate(itertools.permutations(range(count)))}
    counts = numpy.zeros(len(every))
    for epoch in range(2000):
        counts[every[tuple(permuted(numpy.arange(count), count, (1, epoch)).tolist())]] += 1
    assert chi_squared(counts) < 1 + 4 * math.sqrt(2 / (len(every) - 1))


@pytest.mark.parametrize("count", [5, 8, 13, 33])
def test_every_sample_is_equally_likely_at_every_place_and_beside_every_other(count: int) -> None:
    places, neighbours = numpy.zeros((count, count)), numpy.zeros((count, count))
    for epoch in range(1500):
        order = permuted(numpy.arange(count), count, (1, epoch))
        places[numpy.arange(count), order] += 1
        neighbours[order[:-1], order[1:]] += 1
    assert chi_squared(places) < 1 + 4 * math.sqrt(2 / (count - 1) ** 2)
    others = neighbours[~numpy.eye(count, dtype=bool)]
    assert chi_squared(others) < 1 + 4 * math.sqrt(2 / (len(others) - 1))


def test_parts_of_an_epoch_are_those_of_the_whole() -> None:
    """In blocks, across their ends, backwards, and of another epoch in between."""
    count = 2 * _BLOCK + 77
    whole = [permuted(numpy.arange(count), count, (4, epoch)) for epoch in range(2)]
    order = Order(count, seed=4, shuffle=True)
    for epoch, begin, end in [
        (0, 0, 10), (0, 10, 20), (0, _BLOCK - 5, _BLOCK + 5), (0, _BLOCK, count), (0, 3, 4), (1, 3, 9), (0, 5, 5),
        (1, count - 1, count), (0, 0, count),
    ]:  # fmt: skip
        numpy.testing.assert_array_equal(order.samples(epoch, begin, end), whole[epoch][begin:end])
    assert Order(count, seed=4, shuffle=False).samples(1, 7, 12).tolist() == [7, 8, 9, 10, 11]


def test_it_keeps_no_array_of_the_size_of_the_data_set() -> None:
    """A trillion samples: 8 TB, were it kept."""
    tracemalloc.start()
    order = Order(10**12, seed=0, shuffle=True)
    numbers = numpy.concatenate([order.samples(0, begin, begin + 1000) for begin in (0, 10**11, 10**12 - 1000)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(numbers.tolist())) == 3000
    assert peak_bytes < 4e6


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


class Interrupting:
    """Batches 0, 1, 2 and so on. While it reads batch `at`, the main thread is interrupted, once it is `awaited`."""

    steps_per_epoch, epoch = 1, 0

    def __init__(self, at: int) -> None:
        self.place, self._at = 0, at
        self.begun, self.awaited, self.left = threading.Event(), threading.Event(), threading.Event()

    def __next__(self) -> tuple[int, int]:
        if self.place == self._at and not self.left.is_set():
            self.begun.set()
            self.awaited.wait()
            time.sleep(0.1)  # for the main thread to begin its wait
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.left.wait()
        self.place += 1
        return self.place - 1, 1

    def share_out(self, samples_per_second: float) -> None:
        raise AssertionError

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def restore(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_an_interrupt_while_waiting_for_a_batch() -> None:
    source = Interrupting(at=0)
    data = Prefetch(source)
    with pytest.raises(KeyboardInterrupt):
        source.awaited.set()
        next(data)
    source.left.set()
    assert data.state() == {"place": 0}
    assert [next(data)[0] for _ in range(3)] == [0, 1, 2]
    data.close()


def test_an_interrupt_while_the_thread_ends() -> None:
    source = Interrupting(at=1)
    data = Prefetch(source, batches=1)
    assert next(data)[0] == 0
    source.begun.wait()
    with pytest.raises(KeyboardInterrupt):
        source.awaited.set()
        data.close()
    source.left.set()
    assert [next(data)[0] for _ in range(2)] == [1, 2]
    data.close()
    assert "mpitrain prefetch" not in [thread.name for thread in threading.enumerate()]
