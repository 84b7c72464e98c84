"""The products of PowerSGD: the bits of those on the host."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain.compression.power_sgd import Products
from mpitrain.cuda import kernels

from .common import Lying, assert_same, numbers

# Rows, columns, rank: of one row, of fewer columns than a warp has threads, of lanes and blocks of rows that are full
# or not, of more than one tile of columns of P.
SHAPES = [(1, 1, 1), (1, 5, 1), (2, 3, 1), (3, 2, 2), (33, 31, 4), (64, 128, 2), (7, 300, 4), (129, 257, 3)]
SHAPES += [(65, 132, 5), (40, 20, 9), (32, 516, 4), (100, 96, 64)]
# Where each array begins: all at multiples of 16 bytes, none, and not alike.
PLACES = [(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 1, 0), (4, 0, 0, 3)]
ON_HOST = Products(False)


def made(cupy: Any, shape: tuple[int, int, int], offsets: tuple[int, ...], seed: int) -> tuple[list[Any], list[Any]]:
    """M, what is left out, P and Q by columns: on the host and on the device."""
    rows, columns, rank = shape
    shapes = [(rows, columns), (rows, columns), (rank, rows), (rank, columns)]
    host = [numbers("float32", m * n, seed + place).reshape(m, n) for place, (m, n) in enumerate(shapes)]
    return host, [Lying(cupy, one.flatten(), offset) for one, offset in zip(host, offsets, strict=True)]


def views(device: list[Any], host: list[Any]) -> list[Any]:
    return [one.array.reshape(values.shape) for one, values in zip(device, host, strict=True)]


def assert_all_same(device: list[Any], host: list[Any]) -> None:
    for found, expected in zip(device, host, strict=True):
        assert_same(found.get(), expected.ravel())


@pytest.mark.parametrize("shape", SHAPES)
def test_low_rank_products(cupy: Any, shape: tuple[int, int, int]) -> None:
    for offsets in PLACES:
        host, device = made(cupy, shape, offsets, 20)
        matrix, left, pt, qt = host
        there = views(device, host)
        ON_HOST.times(matrix, left, qt, pt)
        kernels.low_rank_times(there[0], there[1], there[3], there[2])
        assert_all_same(device, host)
        ON_HOST.project(matrix, pt, qt, left)
        kernels.low_rank_project(there[0], there[2], there[3], there[1])
        assert_all_same(device, host)
        ON_HOST.product(pt, qt, matrix)
        kernels.low_rank_product(there[2], there[3], there[0])
        assert_all_same(device, host)


@pytest.mark.parametrize("value", [1e38, 1e18, 1e-30, 0.0])
def test_low_rank_products_at_the_ends_of_float32(cupy: Any, value: float) -> None:
    """Sums that are infinite, not a number, subnormal or 0."""
    host, device = made(cupy, (33, 40, 4), (0, 0, 0, 0), 24)
    for values, one in zip(host, device, strict=True):
        numpy.multiply(values, value, out=values, dtype=numpy.float32)
        one.array.set(values.flatten())
    matrix, left, pt, qt = host
    there = views(device, host)
    ON_HOST.times(matrix, left, qt, pt)
    kernels.low_rank_times(there[0], there[1], there[3], there[2])
    assert_all_same(device, host)
    assert numpy.isfinite(pt).all() == (value < 1)
    ON_HOST.project(matrix, pt, qt, left)
    kernels.low_rank_project(there[0], there[2], there[3], there[1])
    assert_all_same(device, host)


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (4, 1000), (3, 128), (9, 20), (64, 100)])
@pytest.mark.parametrize("offset", [0, 1])
def test_low_rank_orthogonalise(cupy: Any, shape: tuple[int, int], offset: int) -> None:
    rows = numbers("float32", shape[0] * shape[1], 30).reshape(shape)
    if shape[0] > 2:
        rows[1], rows[2] = 0, 3 * rows[0]  # these become 0
    device = Lying(cupy, rows.flatten(), offset)
    work = Lying(cupy, numpy.full(rows.size, numpy.nan))
    kernels.low_rank_orthogonalise(device.array.reshape(shape), work.array)
    ON_HOST.orthogonalise(rows)
    assert_same(device.get(), rows.ravel())
    assert numpy.isfinite(work.get()).all()
    assert rows[0].any()
    if shape[0] > 2:
        assert not rows[1:3].any()


def test_low_rank_of_nothing(cupy: Any) -> None:
    none = cupy.zeros((0, 5), numpy.float32)
    kernels.low_rank_times(none, none, none, cupy.zeros((0, 0), numpy.float32))
    kernels.low_rank_orthogonalise(none, cupy.zeros(0, numpy.float64))
