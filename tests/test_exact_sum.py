"""Exact sums on one rank, of the compiled loops and of their twins: against fractions, bit for bit."""

from __future__ import annotations

import numpy
import pytest

from mpitrain.allreduce.accumulator import Accumulator
from mpitrain.allreduce.fixed_point import FORMS
from mpitrain.compression.kernels import can_compile
from tests.exact_values import LIMITS, exact_sums, hard_values

COUNT = 9 * 17 * 2 + 250  # more than two blocks


@pytest.fixture(params=[False, True], ids=["numpy", "compiled"], scope="module")
def accumulator(request: pytest.FixtureRequest) -> Accumulator:
    if request.param and not can_compile():
        pytest.skip("Numba is not installed, or switched off")
    return Accumulator(compiles=request.param)


@pytest.mark.parametrize("num_summands", [1, 2, 3, 32])
@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_the_sum_is_the_nearest_value(accumulator: Accumulator, dtype: numpy.dtype, num_summands: int) -> None:
    summands = [hard_values(dtype, COUNT, number) for number in range(num_summands)]
    expected = exact_sums(summands)
    for order in (1, -1):
        total = numpy.empty(COUNT, dtype)
        with numpy.errstate(all="raise"):
            accumulator.add_up(summands[::order], total)
        numpy.testing.assert_array_equal(total.view(expected.dtype), expected)


@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_ties_and_powers_of_two(accumulator: Accumulator, dtype: numpy.dtype) -> None:
    """The last of three summands, the smallest number, decides a tie. A power of two leaves all lower limbs empty."""
    precision, exponent, end = LIMITS[str(dtype)]
    half, smallest = 2.0**-precision, 2.0**exponent
    columns = [(a, b * half, c * smallest) for a in (1, 1 + 2 * half, -1) for b in (-1, 0, 1) for c in (-1, 0, 1)]
    powers = 2.0 ** numpy.arange(exponent, end)
    columns += [(sign * power, 0, 0) for power in powers for sign in (1, -1)]
    summands = [numpy.array(row).astype(dtype) for row in zip(*columns, strict=True)]
    expected = exact_sums(summands)
    total = numpy.empty(len(columns), dtype)
    accumulator.add_up(summands, total)
    numpy.testing.assert_array_equal(total.view(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float64])
def test_sums_that_need_one_bit_more_than_the_words(accumulator: Accumulator, dtype: type) -> None:
    """Twice -2^n leaves all words empty and the bit above them, for the n that just fills them."""
    for gap in range(40, 120):
        row = numpy.zeros(257, dtype)
        row[:3] = -(2.0**gap), 2.0**gap, 1.0
        summands = [row, row.copy(), numpy.zeros_like(row)]
        # In another block: an inexact addition, so that all are added up as whole numbers.
        summands[0][256], summands[1][256] = 1.0, 2.0**-60
        summands[2][256] = 2.0**-60
        total = numpy.empty_like(row)
        accumulator.add_up(summands, total)
        assert total[:3].tolist() == (2.0 * row[:3]).tolist()
        assert (total[3:256] == 0).all()
        assert total[256] == 1
