"""The squared norm, with its order of additions."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from mpitrain.cuda import kernels

from .common import Lying, any_bits, assert_same, by_float, numbers


def norm_as_described(values: numpy.ndarray) -> numpy.float64:
    """The order of norm.cu, by NumPy."""
    lanes = 256 * 256
    wide = values.astype(numpy.float64)
    padded = numpy.append(wide, numpy.zeros(-wide.size % (4 * lanes))).reshape(-1, lanes, 4)
    sums = numpy.zeros(lanes)
    for row in padded:
        for k in range(4):
            sums += row[:, k] * row[:, k]

    def tree(rows: numpy.ndarray) -> numpy.ndarray:
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        return rows[:, 0]

    return tree(tree(sums.reshape(256, 256)).reshape(1, 256))[0]


@by_float
@pytest.mark.parametrize("size", [0, 1, 5, 40_003, 1_500_001])
def test_squared_norm(cupy: Any, dtype: numpy.dtype, size: int) -> None:
    for seed, values in ((12, numbers(dtype, size, 12)), (13, any_bits(dtype, size, 13))):
        expected = norm_as_described(values)
        for offset in (0, 1) if seed == 12 or size < 2000 else (0,):
            out = Lying(cupy, numpy.full(1, 99.0))
            kernels.squared_norm(Lying(cupy, values, offset).array, out.array)
            assert_same(out.get(), numpy.array([expected]))


@pytest.mark.parametrize(
    ("squared", "max_norm"),
    [(9.0, 1.0), (9.0, 3.0), (9.0, 3.5), (1e300, 1.0), (0.0, 1.0), (9.0, 0.3), (math.inf, 1.0), (math.nan, 1.0)],
)
def test_clip_factor(cupy: Any, squared: float, max_norm: float) -> None:
    factor = Lying(cupy, numpy.zeros(1))
    kernels.clip_factor(cupy.asarray(numpy.array([squared])), max_norm, factor.array)
    norm = math.sqrt(squared)
    assert factor.get()[0] == (max_norm / norm if max_norm < norm < math.inf else 1.0)
