"""The order of samples: a permutation for every number of them, another one each epoch, all equally likely."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy
import pytest

from mpitrain.data.order import _BLOCK, _ROUNDS, Order, permuted

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
