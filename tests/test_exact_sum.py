"""Exact sums on one rank, of the compiled loops and of their twins: against fractions, bit for bit."""

from __future__ import annotations

import numpy
import pytest

from mpitrain.allreduce.accumulator import Accumulator
from mpitrain.allreduce.fixed_point import FORMS
from mpitrain.compression.kernels import can_compile
from tests.exact_values import exact_sums, hard_values

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
        accumulator.add_up(summands[::order], total)
        numpy.testing.assert_array_equal(total.view(expected.dtype), expected)
