"""Sums, packing, scaling, and whether all is finite."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain.cuda import kernels

from .common import OFFSETS, SIZES, Lying, any_bits, assert_same, by_dtype, by_float, numbers


@by_dtype
def test_add(cupy: Any, dtype: numpy.dtype) -> None:
    for size in SIZES:
        for first, second in OFFSETS:
            a, b = any_bits(dtype, size, 1), any_bits(dtype, size, 2)
            total, arrived = Lying(cupy, a, first), Lying(cupy, b, second)
            kernels.add(total.array, arrived.array)
            assert_same(total.get(), a + b)
            assert_same(arrived.get(), b)


@by_dtype
@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 40])
def test_sum_of(cupy: Any, dtype: numpy.dtype, count: int) -> None:
    for size in (0, 1, 5, 257, 4099):
        for offset, odd in ((0, 0), (1, 1), (0, 3)):
            values = [
                numbers(dtype, size, part) if dtype.kind in "fV" else any_bits(dtype, size, part)
                for part in range(count)
            ]
            parts = [Lying(cupy, one, odd if number == 0 else offset) for number, one in enumerate(values)]
            expected = values[0].copy()
            for one in values[1:]:
                expected = expected + one
            out = Lying(cupy, numpy.zeros(size, dtype), offset)
            kernels.sum_of([part.array for part in parts], out.array)
            assert_same(out.get(), expected)
            for part, one in zip(parts, values, strict=True):
                assert_same(part.get(), one)
            last = parts[min(count, 16) - 1]
            kernels.sum_of([part.array for part in parts], last.array)
            assert_same(last.get(), expected)
            last.array.set(values[min(count, 16) - 1])
            # Also into other parts, as into the buffers of other ranks, and into one that is aligned in another way.
            others = [Lying(cupy, numpy.zeros(size, dtype), odd), *[part for part in parts[:14] if part is not last]]
            kernels.sum_of([part.array for part in parts], last.array, copies=[other.array for other in others])
            for other in (last, *others):
                assert_same(other.get(), expected)


def sizes_of_many(seed: int) -> list[int]:
    """Empty, small and large ones; more than fit in one launch."""
    generator = numpy.random.default_rng(seed)
    sizes = [int(size) for size in generator.integers(0, 40, 500)]
    return [0, 5000, 0, 0, *sizes, 3001, 1, 0]


@by_dtype
def test_pack(cupy: Any, dtype: numpy.dtype) -> None:
    for offset in (0, 1):
        for sizes in ([], [0], [1], [7, 0, 300], sizes_of_many(5)):
            values = [any_bits(dtype, size, number) for number, size in enumerate(sizes)]
            arrays = [Lying(cupy, one, number % 3) for number, one in enumerate(values)]
            together = numpy.concatenate([numpy.empty(0, dtype), *values])
            flat = Lying(cupy, numpy.zeros(together.size, dtype), offset)
            kernels.pack([one.array for one in arrays], flat.array)
            assert flat.get().tobytes() == together.tobytes()


def test_pack_takes_any_shape(cupy: Any) -> None:
    values = [numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4), numpy.array(7, numpy.float32)]
    flat = cupy.zeros(25, numpy.float32)
    kernels.pack([cupy.asarray(one) for one in values], flat)
    assert flat.get().tolist() == [*range(24), 7]


@by_float
def test_scale(cupy: Any, dtype: numpy.dtype) -> None:
    for size in SIZES:
        for offset in (0, 1, 3):
            for factor in (0.3, 1.0, 0.0, -2.5e-3):
                values = any_bits(dtype, size, 8)
                flat = Lying(cupy, values, offset)
                kernels.scale(flat.array, factor)
                if factor == 0:
                    expected = numpy.zeros_like(values)
                elif dtype.itemsize == 8:
                    expected = values * factor
                else:
                    expected = (values.astype(numpy.float32) * numpy.float32(factor)).astype(dtype)
                assert_same(flat.get(), expected)


@by_float
def test_all_finite(cupy: Any, dtype: numpy.dtype) -> None:
    for size in SIZES:
        for offset in (0, 1):
            values = numbers(dtype, size, 9)
            flag = Lying(cupy, numpy.zeros(1, numpy.int32))
            kernels.all_finite(Lying(cupy, values, offset).array, flag.array)
            assert flag.get().tolist() == [0]
            for place in {0, size // 2, size - 1} if size else ():
                for bad in (numpy.inf, -numpy.inf, numpy.nan):
                    flag.array.fill(0)
                    wrong = values.copy()
                    wrong[place] = bad
                    kernels.all_finite(Lying(cupy, wrong, offset).array, flag.array)
                    assert flag.get().tolist() == [1]
            flag.array.fill(1)
            kernels.all_finite(Lying(cupy, values, offset).array, flag.array)
            assert flag.get().tolist() == [1]
