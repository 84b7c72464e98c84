"""Products with thin matrices for power_sgd.py, for Numba, and their twins in NumPy, which give the same bits.

The order of each sum is fixed, as no library's product promises: times and orthogonalise add in 32 lanes (element i in
lane i modulo 32), then lane i and i + 16, i and i + 8, until one is left.
"""

from __future__ import annotations

import math

import numpy
from numpy import float32, float64

LANES = 32
# A row that is this much shorter than it was depends on the rows before: the rest is the rounding of float32.
_DEPENDENT = 1e-6


def times(matrix: numpy.ndarray, qt: numpy.ndarray, pt: numpy.ndarray, lanes: numpy.ndarray) -> None:
    """See power_sgd.Products."""
    count = matrix.shape[1]
    whole = count - count % LANES
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for c in range(qt.shape[0]):
            column = qt[c]
            lanes[:] = float32(0)
            for start in range(0, whole, LANES):
                one, other = row[start : start + LANES], column[start : start + LANES]
                for lane in range(LANES):
                    lanes[lane] += one[lane] * other[lane]
            for lane in range(count - whole):
                lanes[lane] += row[whole + lane] * column[whole + lane]
            length = LANES // 2
            while length > 0:
                for lane in range(length):
                    lanes[lane] += lanes[lane + length]
                length //= 2
            pt[c, i] = lanes[0]


def times_twin(matrix: numpy.ndarray, qt: numpy.ndarray, pt: numpy.ndarray, lanes: numpy.ndarray) -> None:
    """See power_sgd.Products."""
    for i, row in enumerate(matrix):
        for c, column in enumerate(qt):
            pt[c, i] = _in_lanes(row * column, lanes)


def _in_lanes(terms: numpy.ndarray, lanes: numpy.ndarray) -> float:
    """Return the sum of the terms in the lanes' dtype."""
    rounds = numpy.zeros((1 - -terms.size // LANES, LANES), lanes.dtype)
    rounds[1:].reshape(-1)[: terms.size] = terms
    lanes[:] = numpy.add.accumulate(rounds, axis=0)[-1]
    length = LANES // 2
    while length:
        lanes[:length] += lanes[length : 2 * length]
        length //= 2
    return lanes[0]  # type: ignore[no-any-return]


def transposed_times(matrix: numpy.ndarray, pt: numpy.ndarray, qt: numpy.ndarray) -> None:
    """See power_sgd.Products."""
    qt[:] = float32(0)
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for c in range(pt.shape[0]):
            factor, into = pt[c, i], qt[c]
            for j in range(row.size):
                into[j] += factor * row[j]


def transposed_times_twin(matrix: numpy.ndarray, pt: numpy.ndarray, qt: numpy.ndarray) -> None:
    """See power_sgd.Products."""
    qt[:] = 0
    for i, row in enumerate(matrix):
        qt += pt[:, i : i + 1] * row


def product(pt: numpy.ndarray, qt: numpy.ndarray, out: numpy.ndarray) -> None:
    """See power_sgd.Products."""
    for i in range(out.shape[0]):
        row, factor, column = out[i], pt[0, i], qt[0]
        for j in range(row.size):
            row[j] = factor * column[j]
        for c in range(1, pt.shape[0]):
            factor, column = pt[c, i], qt[c]
            for j in range(row.size):
                row[j] += factor * column[j]


def product_twin(pt: numpy.ndarray, qt: numpy.ndarray, out: numpy.ndarray) -> None:
    """See power_sgd.Products."""
    numpy.multiply(pt[0][:, None], qt[0], out=out)
    for one, other in zip(pt[1:], qt[1:], strict=True):
        out += one[:, None] * other


def orthogonalise(rows: numpy.ndarray, work: numpy.ndarray, lanes: numpy.ndarray) -> None:
    """See power_sgd.Products. Gram and Schmidt's way in float64, twice: once is not enough for nearly equal rows."""
    count = rows.shape[1]
    for c in range(rows.shape[0]):
        for j in range(count):
            work[c, j] = float64(rows[c, j])
        # The length before, each earlier row twice, and the length after are all products of two rows.
        length_before = 0.0
        for step in range(2 * c + 2):
            b = c if step == 0 or step == 2 * c + 1 else (step - 1) % c
            lanes[:] = 0.0
            one, other = work[b], work[c]
            for j in range(count):
                lanes[j % LANES] += one[j] * other[j]
            half = LANES // 2
            while half > 0:
                for lane in range(half):
                    lanes[lane] += lanes[lane + half]
                half //= 2
            product_of_two = lanes[0]
            if step == 0:
                length_before = math.sqrt(product_of_two)
            elif step == 2 * c + 1:
                length = math.sqrt(product_of_two)
                if length > _DEPENDENT * length_before:
                    for j in range(count):
                        other[j] /= length
                else:
                    other[:] = 0.0
            else:
                for j in range(count):
                    other[j] -= product_of_two * one[j]
        for j in range(count):
            rows[c, j] = float32(work[c, j])


def orthogonalise_twin(rows: numpy.ndarray, work: numpy.ndarray, lanes: numpy.ndarray) -> None:
    """See orthogonalise."""
    work[:] = rows
    for c in range(len(work)):
        row = work[c]
        before = math.sqrt(_in_lanes(row * row, lanes))
        for earlier in [*work[:c], *work[:c]]:
            numpy.subtract(row, _in_lanes(earlier * row, lanes) * earlier, out=row)
        after = math.sqrt(_in_lanes(row * row, lanes))
        if after > _DEPENDENT * before:
            numpy.divide(row, after, out=row)
        else:
            row[:] = 0
    rows[:] = work
