"""power_sgd: a matrix as the product of two thin ones, m r + r n numbers instead of m n; the default of r is 4.

`power_sgd:2` is rank 2. It is not a codec, because it needs the shapes of the gradients, and two sums in succession. A
tensor of two or more dimensions is a matrix with one row for each first index. It is sent unchanged if that takes no
more numbers, and so are vectors. For all others, with the matrix M of each rank (its share of the mean, plus its
residual):

    P = sum of M Q          first sum; Q is that of the step before, so each step continues from the last (warm start)
    P = orthogonalise(P)    r columns of length 1
    R = M^T P, Q = sum of R second sum
    P Q^T                   the result, with the same bits on every rank
    M - P R^T               stays on this rank for the next step

Worked, rank 1, two ranks with M = u v^T and M = 3 u v^T, u = (3, 4), v = (1, 2, 2), and Q = (1, 0, 0): the ranks have
M Q = (3, 4) and (9, 12), so P = (12, 16), and of length 1 it is (0.6, 0.8). M^T P is 5 v and 15 v, and Q = 20 v = (20,
40, 40). P Q^T = 4 u v^T is the sum, and the residual is 0: a sum whose rank is at most r is exact.

Here P and Q are stored by columns: pt[c] is column c of P. A column of P that depends on the columns before it is 0 and
adds nothing. A column of Q that became 0 is initialised again. So a gradient of 0 does not end the training of its
matrix.

All sums have a fixed order, which products.py states, and the columns of P are made orthogonal in float64. So every
rank, with Numba or without, makes the same P Q^T of the same numbers.

Source: Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2. Their algorithm takes the mean of ranks with equal weights, and
orthogonalises once. Here Q is made orthogonal too, so that small gradients do not underflow in M Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy

from mpitrain.compression import kernels, products
from mpitrain.errors import ConfigError

NAME = "power_sgd"
RANK = 4
_HIGHEST = 64


class Matrix(NamedTuple):
    """A matrix that is sent as two factors.

    Attributes:
        key: identifies it from step to step.
        begin: its place in the flat buffer, in elements.
        rank: the columns of its factors, at most `rows` and `columns`.
    """

    key: Hashable
    begin: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: numpy.ndarray) -> numpy.ndarray:
        """Return the matrix in a flat buffer."""
        return flat[self.begin : self.begin + self.rows * self.columns].reshape(self.rows, self.columns)


@dataclass
class Plan:
    """The contents of a flat buffer: the matrices, and the parts that are sent unchanged."""

    matrices: list[Matrix] = field(default_factory=list)
    whole: list[slice] = field(default_factory=list)

    @property
    def num_first(self) -> int:
        """The number of values in the first sum."""
        as_they_are: int = sum(part.stop - part.start for part in self.whole)
        return as_they_are + sum(one.rows * one.rank for one in self.matrices)

    @property
    def num_second(self) -> int:
        """The number of values in the second sum."""
        return sum(one.columns * one.rank for one in self.matrices)


def rank_of(name: str) -> int:
    """Return the rank that `power_sgd` or `power_sgd:RANK` asks for.

    Raises:
        ConfigError: the text after the colon is not a rank.
    """
    _, colon, text = name.partition(":")
    if not colon:
        return RANK
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= _HIGHEST:
        raise ConfigError(
            f"compression {name}: the rank is {text!r}; allowed are whole numbers from 1 to {_HIGHEST}, as in "
            f"{NAME}:{RANK}"
        )
    return int(text)


def plan(tensors: Iterable[tuple[Hashable, tuple[int, ...]]], rank: int) -> Plan:
    """Plan the exchange of tensors, given by key and shape, that lie one after the other in a flat buffer."""
    result, begin = Plan(), 0
    for key, shape in tensors:
        count = math.prod(shape)
        rows = shape[0] if shape else 0
        columns = count // rows if rows else 0
        if len(shape) > 1 and (rows + columns) * min(rank, rows, columns) < count:
            result.matrices.append(Matrix(key, begin, rows, columns, min(rank, rows, columns)))
        elif count:
            result.whole.append(slice(begin, begin + count))
        begin += count
    return result


def first_factor(matrix: Matrix) -> numpy.ndarray:
    """Return the Q, float32[rank, columns], of the first step: numbers between -1 and 1, the same on every machine."""
    with numpy.errstate(over="ignore"):  # splitmix64: Steele, Lea and Flood, OOPSLA 2014
        bits = numpy.arange(1, matrix.rank * matrix.columns + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    steps = (bits >> numpy.uint64(43)).astype(numpy.int64) - 2**20  # 21 bits: exact in float32
    return (steps / 2.0**20).astype(numpy.float32).reshape(matrix.rank, matrix.columns)


class Products:
    """The arithmetic of a step, by Numba or in NumPy. It has scratch memory: one caller at a time.

    All arrays are float32 and contiguous; pt and qt hold P and Q by columns. No two of them overlap.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

        def made(fast: Callable[..., None], twin: Callable[..., None]) -> Callable[..., None]:
            return kernels.compiled(fast) if compiled else twin

        self._times = made(products.times, products.times_twin)
        self._transposed_times = made(products.transposed_times, products.transposed_times_twin)
        self._product = made(products.product, products.product_twin)
        self._orthogonalise = made(products.orthogonalise, products.orthogonalise_twin)
        self._lanes = numpy.empty(products.LANES, numpy.float32)
        self._wide_lanes = numpy.empty(products.LANES, numpy.float64)

    def warm_up(self) -> None:
        """Compile now: to compile in the middle of a training step would delay every rank."""
        one, other = (numpy.ones((1, 1), numpy.float32) for _ in range(2))
        self.times(one, other, one.copy(), one.copy())
        self.project(one, one.copy(), one.copy(), other)
        self.product(one, one.copy(), other)
        self.orthogonalise(one)

    def times(self, matrix: numpy.ndarray, left_out: numpy.ndarray, qt: numpy.ndarray, pt: numpy.ndarray) -> None:
        """Add left_out[m, n] to matrix[m, n]; then overwrite pt[r, m] with matrix Q, of qt[r, n]."""
        self._times(matrix, left_out, qt, pt, self._lanes)

    def orthogonalise(self, rows: numpy.ndarray) -> None:
        """Make the rows orthogonal and of length 1, the first one first; a row that depends on others becomes 0."""
        self._orthogonalise(rows, numpy.empty(rows.shape), self._wide_lanes)

    def project(self, matrix: numpy.ndarray, pt: numpy.ndarray, qt: numpy.ndarray, left_out: numpy.ndarray) -> None:
        """Overwrite qt with matrix^T P, and then left_out[m, n] with matrix - P Q^T."""
        self._transposed_times(matrix, pt, qt, left_out[0])
        self._product(pt, qt, matrix, left_out)

    def product(self, pt: numpy.ndarray, qt: numpy.ndarray, out: numpy.ndarray) -> None:
        """Overwrite out[m, n] with P Q^T."""
        self._product(pt, qt, out[:0], out)
