"""Products with thin matrices for power_sgd.py, for Numba, and their twins in NumPy, which give the same bits.

The order of each sum is fixed, which no library's product guarantees. It allows vector instructions on many elements:

- times and orthogonalise add in 128 lanes, which begin at 0: element i in lane i modulo 128. Then lanes i and i + 64
  are added, then i and i + 32, until one remains.
- transposed_times adds 32 rows, one after the other, from 0 on; then the sums of the rows 0 to 31, 32 to 63 and so on,
  one after the other, from 0 on.
- product adds column after column.

Each sum and each product is rounded once. LLVM makes vector instructions of these loops; see kernels.py. They take four
rows or columns at a time, because the sum then stays in a register for four additions.
"""

from __future__ import annotations

import math

import numpy
from numpy import float32, float64

LANES = 128
ROWS = 32
# A row that is this much shorter than it was depends on the rows before: the rest is the rounding of float32.
DEPENDENT = 1e-6


def times(
    matrix: numpy.ndarray, left_out: numpy.ndarray, qt: numpy.ndarray, pt: numpy.ndarray, lanes: numpy.ndarray
) -> None:
    """See power_sgd.Products. `lanes` is float32[LANES]."""
    count = matrix.shape[1]
    whole, fours = count - count % LANES, count - count % (4 * LANES)
    for i in range(matrix.shape[0]):
        row, left = matrix[i], left_out[i]
        for j in range(count):
            row[j] += left[j]
        for c in range(qt.shape[0]):
            column = qt[c]
            lanes[:] = float32(0)
            for start in range(0, fours, 4 * LANES):
                a, b, d, e = (
                    row[start : start + LANES],
                    row[start + LANES : start + 2 * LANES],
                    row[start + 2 * LANES : start + 3 * LANES],
                    row[start + 3 * LANES : start + 4 * LANES],
                )
                one, two, three, four = (
                    column[start : start + LANES],
                    column[start + LANES : start + 2 * LANES],
                    column[start + 2 * LANES : start + 3 * LANES],
                    column[start + 3 * LANES : start + 4 * LANES],
                )
                for lane in range(LANES):
                    sum_so_far = (lanes[lane] + a[lane] * one[lane]) + b[lane] * two[lane]
                    lanes[lane] = (sum_so_far + d[lane] * three[lane]) + e[lane] * four[lane]
            for start in range(fours, whole, LANES):
                a, one = row[start : start + LANES], column[start : start + LANES]
                for lane in range(LANES):
                    lanes[lane] += a[lane] * one[lane]
            for lane in range(count - whole):
                lanes[lane] += row[whole + lane] * column[whole + lane]
            length = LANES // 2
            while length > 0:
                for lane in range(length):
                    lanes[lane] += lanes[lane + length]
                length //= 2
            pt[c, i] = lanes[0]


def times_twin(
    matrix: numpy.ndarray, left_out: numpy.ndarray, qt: numpy.ndarray, pt: numpy.ndarray, _lanes: numpy.ndarray
) -> None:
    """See times."""
    numpy.add(matrix, left_out, out=matrix)
    for c, column in enumerate(qt):
        pt[c] = _in_lanes(matrix, column)


def _in_lanes(rows: numpy.ndarray, column: numpy.ndarray) -> numpy.ndarray:
    """Return the products of the rows with the column, in their dtype."""
    lanes = numpy.zeros((len(rows), LANES), rows.dtype)
    for start in range(0, column.size, LANES):
        part = rows[:, start : start + LANES] * column[start : start + LANES]
        lanes[:, : part.shape[1]] += part
    length = LANES // 2
    while length:
        lanes[:, :length] += lanes[:, length : 2 * length]
        length //= 2
    return lanes[:, 0]


def transposed_times(matrix: numpy.ndarray, pt: numpy.ndarray, qt: numpy.ndarray, scratch: numpy.ndarray) -> None:
    """Overwrite qt, float32[r, n], with matrix^T P. `scratch` is float32[n]."""
    num_rows = matrix.shape[0]
    qt[:] = float32(0)
    for first in range(0, num_rows, ROWS):
        stop = min(first + ROWS, num_rows)
        fours = stop - (stop - first) % 4
        for c in range(pt.shape[0]):
            factors, into = pt[c], qt[c]
            scratch[:] = float32(0)
            for i in range(first, fours, 4):
                a, b, d, e = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
                one, two, three, four = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
                for j in range(scratch.size):
                    scratch[j] = (((scratch[j] + a * one[j]) + b * two[j]) + d * three[j]) + e * four[j]
            for i in range(fours, stop):
                a, one = factors[i], matrix[i]
                for j in range(scratch.size):
                    scratch[j] += a * one[j]
            for j in range(scratch.size):
                into[j] += scratch[j]


def transposed_times_twin(matrix: numpy.ndarray, pt: numpy.ndarray, qt: numpy.ndarray, _scratch: numpy.ndarray) -> None:
    """See transposed_times."""
    qt[:] = 0
    for first in range(0, len(matrix), ROWS):
        part = numpy.zeros_like(qt)
        for i in range(first, min(first + ROWS, len(matrix))):
            part += pt[:, i : i + 1] * matrix[i]
        qt += part


def product(pt: numpy.ndarray, qt: numpy.ndarray, whole: numpy.ndarray, out: numpy.ndarray) -> None:
    """Overwrite `out`, float32[m, n], with P Q^T; or with whole - P Q^T, unless `whole` is float32[0, n]."""
    rank = pt.shape[0]
    for i in range(out.shape[0]):
        row, factor, column = out[i], pt[0, i], qt[0]
        done = 1
        if rank >= 4:
            b, d, e = pt[1, i], pt[2, i], pt[3, i]
            two, three, four = qt[1], qt[2], qt[3]
            for j in range(row.size):
                row[j] = ((factor * column[j] + b * two[j]) + d * three[j]) + e * four[j]
            done = 4
        else:
            for j in range(row.size):
                row[j] = factor * column[j]
        for c in range(done, rank):
            factor, column = pt[c, i], qt[c]
            for j in range(row.size):
                row[j] += factor * column[j]
        if whole.shape[0] > 0:
            minuend = whole[i]
            for j in range(row.size):
                row[j] = minuend[j] - row[j]


def product_twin(pt: numpy.ndarray, qt: numpy.ndarray, whole: numpy.ndarray, out: numpy.ndarray) -> None:
    """See product."""
    numpy.multiply(pt[0][:, None], qt[0], out=out)
    for one, other in zip(pt[1:], qt[1:], strict=True):
        out += one[:, None] * other
    if len(whole):
        numpy.subtract(whole, out, out=out)


def orthogonalise(rows: numpy.ndarray, work: numpy.ndarray, lanes: numpy.ndarray) -> None:
    """See power_sgd.Products. The Gram-Schmidt process in float64, twice: once is not enough for nearly equal rows."""
    count = rows.shape[1]
    whole = count - count % LANES
    for c in range(rows.shape[0]):
        other = work[c]
        for j in range(count):
            other[j] = float64(rows[c, j])
        # The length before, each earlier row twice, and the length after are all products of two rows.
        length_before = 0.0
        for step in range(2 * c + 2):
            one = work[c if step == 0 or step == 2 * c + 1 else (step - 1) % c]
            lanes[:] = 0.0
            for start in range(0, whole, LANES):
                a, b = one[start : start + LANES], other[start : start + LANES]
                for lane in range(LANES):
                    lanes[lane] += a[lane] * b[lane]
            for lane in range(count - whole):
                lanes[lane] += one[whole + lane] * other[whole + lane]
            length_of_half = LANES // 2
            while length_of_half > 0:
                for lane in range(length_of_half):
                    lanes[lane] += lanes[lane + length_of_half]
                length_of_half //= 2
            product_of_two = lanes[0]
            if step == 0:
                length_before = math.sqrt(product_of_two)
            elif step == 2 * c + 1:
                length = math.sqrt(product_of_two)
                if length > DEPENDENT * length_before:
                    for j in range(count):
                        other[j] /= length
                else:
                    other[:] = 0.0
            else:
                for j in range(count):
                    other[j] -= product_of_two * one[j]
        for j in range(count):
            rows[c, j] = float32(other[j])


def orthogonalise_twin(rows: numpy.ndarray, work: numpy.ndarray, _lanes: numpy.ndarray) -> None:
    """See orthogonalise."""

    def dot(one: numpy.ndarray, other: numpy.ndarray) -> float:
        return float(_in_lanes(one[None, :], other)[0])

    work[:] = rows
    for c in range(len(work)):
        row = work[c]
        before = math.sqrt(dot(row, row))
        for earlier in [*work[:c], *work[:c]]:
            numpy.subtract(row, dot(earlier, row) * earlier, out=row)
        after = math.sqrt(dot(row, row))
        if after > DEPENDENT * before:
            numpy.divide(row, after, out=row)
        else:
            row[:] = 0
    rows[:] = work
