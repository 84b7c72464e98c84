"""Values that differ from rank to rank and place to place, and whose sums are known without any of our code.

A rank's values are a tile of TILE elements, repeated. TILE is a prime, so that a segment or piece in the wrong place
does not meet its own values again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16

TILE = 65521
# Sums of up to 16 x 16 ranks' values are exact even with the 8 bits of bfloat16.
_LARGEST = 16


def tile(rank: int, size: int, dtype: numpy.dtype) -> numpy.ndarray:
    """Whole numbers from 0 so small that their sum over `size` ranks is exact in `dtype` (up to 256 ranks)."""
    largest = max(1, min(_LARGEST, _exact_up_to(dtype) // size))
    return numpy.random.default_rng(rank).integers(0, largest + 1, TILE).astype(dtype)


def real_tile(rank: int) -> numpy.ndarray:
    """float32 values evenly spread over [-1, 1)."""
    return numpy.random.default_rng(rank).uniform(-1, 1, TILE).astype(numpy.float32)


def sum_tile(size: int, dtype: numpy.dtype) -> numpy.ndarray:
    """The sum of all ranks' tiles, added up in int64; integers wrap."""
    total = numpy.zeros(TILE, numpy.int64)
    for rank in range(size):
        total += tile(rank, size, dtype).astype(numpy.int64)
    return total.astype(dtype)


def real_sum_tile(size: int) -> numpy.ndarray:
    """The sum of all ranks' real tiles, in float64."""
    return sum((real_tile(rank).astype(numpy.float64) for rank in range(size)), numpy.zeros(TILE))


def fill(flats: Iterable[numpy.ndarray], values: numpy.ndarray) -> None:
    """Overwrite each of `flats` by the repeated tile."""
    for flat in flats:
        whole = flat.size // TILE * TILE
        flat[:whole].reshape(-1, TILE)[:] = values
        flat[whole:] = values[: flat.size - whole]


def count_wrong(flat: numpy.ndarray, expected: numpy.ndarray, tolerance: float = 0.0) -> int:
    """How many elements are not those of the repeated tile: bit for bit, or by more than `tolerance`."""
    whole = flat.size // TILE * TILE
    parts = [(flat[:whole].reshape(-1, TILE), expected), (flat[whole:], expected[: flat.size - whole])]
    if tolerance == 0.0:
        words = f"u{flat.itemsize}"
        return sum(int(numpy.count_nonzero(part.view(words) != right.view(words))) for part, right in parts)
    # NaN is near to nothing.
    return sum(int(numpy.count_nonzero(~(numpy.abs(part - right) <= tolerance))) for part, right in parts)


def _exact_up_to(dtype: numpy.dtype) -> int:
    """The largest number up to which every whole number can be written."""
    if dtype == BFLOAT16:
        return 2**8
    return int(numpy.iinfo(dtype).max) if dtype.kind in "iu" else 2 ** int(numpy.finfo(dtype).nmant + 1)
