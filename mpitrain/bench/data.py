"""Values that differ between ranks and places, and whose sums are known without mpitrain's code.

A rank's values are a tile of TILE elements, repeated. TILE is a prime, so a segment or piece in the wrong place does
not meet equal values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16

TILE = 65521
# Sums of up to 16 x 16 ranks' values are exact even with the 8 bits of bfloat16.
_LARGEST = 16


def tile(rank: int, size: int, dtype: numpy.dtype) -> numpy.ndarray:
    """Return whole numbers from 0, so small that their sum over `size` ranks is exact in `dtype` (up to 256 ranks)."""
    largest = max(1, min(_LARGEST, _exact_up_to(dtype) // size))
    return numpy.random.default_rng(rank).integers(0, largest + 1, TILE).astype(dtype)


def real_tile(rank: int) -> numpy.ndarray:
    """Return float32 values spread evenly over [-1, 1)."""
    return numpy.random.default_rng(rank).uniform(-1, 1, TILE).astype(numpy.float32)


def sum_tile(size: int, dtype: numpy.dtype) -> numpy.ndarray:
    """Return the sum of all ranks' tiles, added up in int64; integers wrap."""
    total = numpy.zeros(TILE, numpy.int64)
    for rank in range(size):
        total += tile(rank, size, dtype).astype(numpy.int64)
    return total.astype(dtype)


def real_sum_tile(size: int) -> numpy.ndarray:
    """Return the sum of all ranks' real tiles, in float64."""
    return sum((real_tile(rank).astype(numpy.float64) for rank in range(size)), numpy.zeros(TILE))


def fill(flats: Iterable[numpy.ndarray], values: numpy.ndarray) -> None:
    """Overwrite each of `flats` with the repeated tile."""
    for flat in flats:
        whole = flat.size // TILE * TILE
        flat[:whole].reshape(-1, TILE)[:] = values
        flat[whole:] = values[: flat.size - whole]


def count_wrong(flat: numpy.ndarray, expected: numpy.ndarray, tolerance: float = 0.0) -> int:
    """Count the elements that differ from the repeated tile: in their bits, or by more than `tolerance`."""
    whole = flat.size // TILE * TILE
    parts = [(flat[:whole].reshape(-1, TILE), expected), (flat[whole:], expected[: flat.size - whole])]
    if tolerance == 0.0:
        words = f"u{flat.itemsize}"
        return sum(int(numpy.count_nonzero(part.view(words) != right.view(words))) for part, right in parts)
    # This form counts NaN as wrong.
    return sum(int(numpy.count_nonzero(~(numpy.abs(part - right) <= tolerance))) for part, right in parts)


def _exact_up_to(dtype: numpy.dtype) -> int:
    """Return the largest number up to which the dtype has every whole number."""
    if dtype == BFLOAT16:
        return 2**8
    return int(numpy.iinfo(dtype).max) if dtype.kind in "iu" else 2 ** int(numpy.finfo(dtype).nmant + 1)
