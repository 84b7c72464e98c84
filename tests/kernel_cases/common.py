"""Values, places of arrays, and comparisons that the cases share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy
import pytest

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
FLOATS = [BFLOAT16, *map(numpy.dtype, ("float16", "float32", "float64"))]
DTYPES = FLOATS + [numpy.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
SIZES = [0, 1, 2, 3, 5, 7, 16, 31, 64, 65, 255, 256, 257, 1000, 4099, 40_003]
# Where each of two arrays begins, in elements: aligned, alike, and not alike.
OFFSETS = [(0, 0), (1, 1), (3, 3), (0, 1), (5, 2)]
GUARD_BYTES = 64

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(autouse=True)
def values_like_any_other() -> Iterator[None]:
    """Infinity and NaN, of which NumPy warns otherwise."""
    with numpy.errstate(all="ignore"):
        yield


class Lying:
    """A device array that holds `values`, `offset` elements behind the beginning of its memory, with guards around."""

    def __init__(self, cupy: Any, values: numpy.ndarray, offset: int = 0) -> None:
        self._before = offset * values.itemsize + GUARD_BYTES
        self._nbytes = values.nbytes
        self._buffer = cupy.empty(self._before + values.nbytes + GUARD_BYTES, numpy.uint8)
        self._buffer.fill(0x5A)
        self.array = self._buffer[self._before : self._before + values.nbytes].view(values.dtype)
        if values.size:
            self.array.set(values)

    def get(self) -> numpy.ndarray:
        """Check the guards. Return the content."""
        end = self._before + self._nbytes
        found = self._buffer.get()
        assert (found[: self._before] == 0x5A).all()
        assert (found[end:] == 0x5A).all()
        return found[self._before : end].view(self.array.dtype)


def any_bits(dtype: Any, size: int, seed: int) -> numpy.ndarray:
    dtype = numpy.dtype(dtype)
    return numpy.frombuffer(numpy.random.default_rng((seed, size)).bytes(size * dtype.itemsize), dtype)


def numbers(dtype: Any, size: int, seed: int) -> numpy.ndarray:
    """Finite values of many magnitudes."""
    generator = numpy.random.default_rng((seed, size))
    return (generator.standard_normal(size) * 2.0 ** generator.integers(-14, 8, size)).astype(dtype)


def assert_same(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bits = numpy.dtype(f"u{found.itemsize}")
    same = found.view(bits) == expected.view(bits)
    if found.dtype.kind in "fV":  # V: bfloat16
        nan = numpy.isnan(expected)
        assert (numpy.isnan(found) == nan).all()
        same |= nan
    assert same.all(), numpy.flatnonzero(~same)[:10]
