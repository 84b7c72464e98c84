"""low_rank: PowerSGD's two sums, made by an algorithm for plain sums. mpitrain/compression/power_sgd.py has the method.

    flat + residual --> [ M Q of each matrix | vectors ]   first sum    --> P of each matrix, the vectors' sum
                    --> [ M^T P of each matrix ]           second sum   --> Q of each matrix, P Q^T

Cost: the cost of two sums of those lengths, one after the other. M is read three times and written twice; the residual
is read and written once. Every rank takes part with its own gradients, including ranks on one node: M Q is linear, so
the sum of products is the product of the sum.

Source: as in power_sgd.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy

from mpitrain.allreduce.algorithm import Progress, Steps, in_phases
from mpitrain.compression.power_sgd import Matrix, Plan, Products, first_factor
from mpitrain.errors import MismatchError, everywhere
from mpitrain.world.world import World

# Digits of 4 bits, of a checksum of 32 bits. Float32 adds whole numbers exactly up to 2^24: the squares of 74565 ranks.
_DIGITS = 8
NUM_MARKS = 2 * _DIGITS  # values behind those of the first sum
Factors = dict[Any, numpy.ndarray]


class LowRank(Protocol):
    """Makes the work on a flat float32 buffer."""

    def __call__(self, flat: numpy.ndarray, residual: numpy.ndarray, plan: Plan, factors: Factors) -> Progress:
        """All arguments but the plan are overwritten: with the sum, the residual, and the Q of the next step.

        All ranks have equal plans.
        """
        ...


def low_rank_steps(world: World, total: Steps, products: Products) -> LowRank:
    """The work on one flat float32 buffer. `total` sums host buffers over the ranks.

    The first sum also checks that all ranks have equal factors. If not, every rank raises a MismatchError.

    A sum that is not finite makes its matrix NaN on every rank; its residual is then 0, and its factor is initialised
    again.
    """

    @in_phases
    def steps(flat: numpy.ndarray, residual: numpy.ndarray, plan: Plan, factors: Factors) -> Iterator[Progress]:
        first, second = (numpy.empty(count, numpy.float32) for count in (plan.num_first + NUM_MARKS, plan.num_second))
        pts, qts = _views(first, plan, lambda matrix: matrix.rows), _views(second, plan, lambda matrix: matrix.columns)
        for matrix, qt in zip(plan.matrices, qts, strict=True):
            qt[:] = _factor(world, matrix, factors)
        with numpy.errstate(all="ignore"):  # infinity and NaN are ordinary values here
            for matrix, pt, qt in zip(plan.matrices, pts, qts, strict=True):
                products.times(matrix.of(flat), matrix.of(residual), qt, pt)
            for part, place in _whole(plan):
                numpy.add(flat[part], residual[part], out=first[place])
                residual[part].fill(0)
        first[plan.num_first :] = _marks(plan, factors)
        yield total(first)
        _check_marks(world.size, first[plan.num_first :])
        for part, place in _whole(plan):
            flat[part] = first[place]
        for matrix, pt, qt in zip(plan.matrices, pts, qts, strict=True):
            if not numpy.isfinite(pt).all():
                qt.fill(numpy.nan)
                continue
            products.orthogonalise(pt)
            with numpy.errstate(all="ignore"):
                products.project(matrix.of(flat), pt, qt, matrix.of(residual))
        if plan.matrices:
            yield total(second)
        for matrix, pt, qt in zip(plan.matrices, pts, qts, strict=True):
            if not numpy.isfinite(qt).all():
                matrix.of(flat).fill(numpy.nan)
                matrix.of(residual).fill(0)
                factors.pop(matrix.key, None)
                continue
            with numpy.errstate(all="ignore"):
                products.product(pt, qt, matrix.of(flat))
            products.orthogonalise(qt)
            factors[matrix.key] = _with_new_columns(matrix, qt).copy()

    return steps


def _marks(plan: Plan, factors: Factors) -> numpy.ndarray:
    """Return the digits of a checksum of the factors, and their squares: small enough for exact sums in float32."""
    known = 0
    for matrix in plan.matrices:
        if (factor := factors.get(matrix.key)) is not None:
            known = zlib.crc32(factor.tobytes(), known)
    digits = numpy.array([known >> 4 * place & 15 for place in range(_DIGITS)])
    return numpy.concatenate([digits, digits**2]).astype(numpy.float32)


def _check_marks(size: int, sums: numpy.ndarray) -> None:
    """The numbers are equal if and only if n x the sum of squares equals the square of the sum. Every rank sees
    both."""
    digits, squares = (part.astype(numpy.int64) for part in (sums[:_DIGITS], sums[_DIGITS:]))
    if (size * squares != digits**2).any():
        raise everywhere(
            MismatchError(
                "the ranks continue from different factors of PowerSGD; they must be those of the same step. Restore "
                "the same checkpoint on every rank"
            )
        )


def _factor(world: World, matrix: Matrix, factors: Factors) -> numpy.ndarray:
    """Return the Q to continue from."""
    known = factors.get(matrix.key)
    if known is not None and known.shape == (matrix.rank, matrix.columns):
        return known
    if known is not None:
        world.print(
            f"mpitrain: the factor of {matrix.key} is {known.shape}, but the compression asks for "
            f"{(matrix.rank, matrix.columns)}, so it is initialised again: its first means are less accurate"
        )
    return first_factor(matrix)


def _views(memory: numpy.ndarray, plan: Plan, length: Callable[[Matrix], int]) -> list[numpy.ndarray]:
    """Return each matrix's factor in the memory of a sum, one after the other from the beginning on."""
    views, begin = [], 0
    for matrix in plan.matrices:
        end = begin + matrix.rank * length(matrix)
        views.append(memory[begin:end].reshape(matrix.rank, -1))
        begin = end
    return views


def _whole(plan: Plan) -> Iterator[tuple[slice, slice]]:
    """The parts of the buffer that are sent as they are, and their places in the first sum, behind the factors."""
    begin = sum(matrix.rows * matrix.rank for matrix in plan.matrices)
    for part in plan.whole:
        end = begin + part.stop - part.start
        yield part, slice(begin, end)
        begin = end


def _with_new_columns(matrix: Matrix, qt: numpy.ndarray) -> numpy.ndarray:
    """Return qt with columns of zeros replaced by those of a first step, because a column of zeros would stay 0."""
    dead = numpy.logical_not(qt.any(axis=1))
    if not dead.any():
        return qt
    return numpy.where(dead[:, None], first_factor(matrix), qt)
