"""Values whose sums are known, and the count of those that are wrong."""

from __future__ import annotations

import numpy
import pytest

from mpitrain.allreduce.algorithm import DTYPES, FLOATS
from mpitrain.forecast.rounds import TILE, count_wrong, fill, real_sum_tile, real_tile, sum_tile, tile

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
