"""The products of PowerSGD, by Numba and by NumPy: the same bits, and against float64."""

from __future__ import annotations

import zlib

import numpy
import pytest

from codec_values import COMPILED, NEEDS_NUMBA, same_bits
from mpitrain.allreduce.low_rank import _check_marks, _marks
from mpitrain.compression.power_sgd import Matrix, Products, first_factor, plan, rank_of
from mpitrain.errors import ConfigError, MismatchError

SHAPES = [(2, 3, 1), (1, 5, 1), (33, 31, 4), (64, 64, 2), (7, 300, 4), (129, 257, 3), (65, 128, 9), (3, 1291, 2)]
UNIT = 2.0**-24


@pytest.fixture(params=COMPILED)
def products(request: pytest.FixtureRequest) -> Products:
    return Products(bool(request.param))


def made(rows: int, columns: int, rank: int) -> tuple[numpy.ndarray, ...]:
    """M, P by columns, Q by columns."""
    random = numpy.random.default_rng((rows, columns))
    return tuple(
        random.standard_normal(shape).astype("f4") for shape in ((rows, columns), (rank, rows), (rank, columns))
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(products: Products, shape: tuple[int, int, int]) -> None:
    """Each sum of k products is off by at most k + 1 roundings of the sum of |products|."""
    matrix, pt, qt = made(*shape)
    left_out = matrix[::-1].copy()
    with_it = matrix + left_out  # each sum rounded once, as NumPy does
    wide, wide_pt, wide_qt = (one.astype(float) for one in (with_it, pt, qt))
    times, transposed, product = numpy.empty_like(pt), numpy.empty_like(qt), numpy.empty_like(matrix)
    products.times(matrix, left_out, qt, times)
    assert same_bits(matrix, with_it)
    products.project(matrix, pt, transposed, left_out)
    assert same_bits(matrix, with_it)
    products.product(pt, qt, product)
    for found, one, other in (
        (times, wide_qt, wide.T),
        (transposed, wide_pt, wide),
        (product, wide_pt.T, wide_qt),
    ):
        bound = (one.shape[1] + 1) * 1.01 * UNIT * (abs(one) @ abs(other))
        assert (abs(found - one @ other) <= bound).all()
        assert found.any()
    # M - P R^T, of R as it was rounded: one more rounding, of the difference.
    wide_r = transposed.astype(float)
    expected = wide - wide_pt.T @ wide_r
    bound = (len(pt) + 2) * 1.01 * UNIT * (abs(wide_pt.T) @ abs(wide_r)) + UNIT * abs(wide)
    assert (abs(left_out - expected) <= bound).all()
    assert left_out.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_and_the_same_space(products: Products, shape: tuple[int, int, int]) -> None:
    rows = made(*shape)[1][:, :]
    rank = min(rows.shape)
    rows = numpy.ascontiguousarray(rows[:rank])
    before = rows.astype(float)
    products.orthogonalise(rows)
    found = rows.astype(float)
    assert abs(found @ found.T - numpy.eye(rank)).max() <= 4 * UNIT
    # What was there is made of the rows that are there now.
    assert abs(before - (before @ found.T) @ found).max() <= 8 * rank * UNIT * abs(before).max() * rows.shape[1] ** 0.5


def test_rows_that_depend_on_others(products: Products) -> None:
    rows = numpy.array([[3, 4, 0, 0], [0, 0, 0, 0], [6, 8, 0, 0], [3, 4, 0, 2], [3, 4, 1e-12, 2]], numpy.float32)
    products.orthogonalise(rows)
    expected = numpy.zeros((5, 4), numpy.float32)
    expected[0, :2] = 0.6, 0.8
    expected[3, 3] = 1
    assert abs(rows - expected).max() <= 2 * UNIT
    assert not rows[[1, 2, 4]].any()


@NEEDS_NUMBA
@pytest.mark.parametrize("shape", SHAPES)
def test_numba_and_numpy_give_the_same_bits(shape: tuple[int, int, int]) -> None:
    matrix, pt, qt = made(*shape)
    found = []
    for products in (Products(True), Products(False)):
        results = [numpy.empty_like(pt), numpy.empty_like(qt), numpy.empty_like(matrix), pt.copy(), qt.copy()]
        mine, left_out = matrix.copy(), matrix[::-1].copy()
        products.times(mine, left_out, qt, results[0])
        products.project(mine, pt, results[1], left_out)
        products.product(pt, qt, results[2])
        products.orthogonalise(results[3])
        products.orthogonalise(results[4])
        found.append([*results, mine, left_out])
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


def test_what_is_sent_as_two_factors() -> None:
    shapes = {"vector": (100,), "small": (3, 4), "scalar": (), "w": (30, 20), "kernel": (64, 3, 3, 3), "none": (0, 5)}
    found = plan(shapes.items(), 2)
    assert found.matrices == [Matrix("w", 113, 30, 20, 2), Matrix("kernel", 713, 64, 27, 2)]
    assert found.whole == [slice(0, 100), slice(100, 112), slice(112, 113)]
    assert found.num_first == 113 + 2 * (30 + 64)
    assert found.num_second == 2 * (20 + 27)
    # As many numbers: not worth it. One fewer: it is.
    assert not plan([("even", (4, 4))], 2).matrices
    assert plan([("less", (4, 5))], 2).matrices == [Matrix("less", 0, 4, 5, 2)]
    assert plan([("thin", (2, 1000))], 4).matrices == []


def test_the_first_factor_is_fixed() -> None:
    """splitmix64 of 1, 2, ..., by Python's integers."""

    def expected(number: int) -> float:
        mask, bits = 2**64 - 1, number * 0x9E3779B97F4A7C15 % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        return ((bits >> 43) - 2**20) / 2**20

    found = first_factor(Matrix("", 0, 9, 7, 3))
    assert found.ravel().tolist() == [expected(number) for number in range(1, 22)]
    assert numpy.linalg.matrix_rank(found) == 3


@pytest.mark.parametrize("text", ["", "0", "-1", "65", "2.0", "x", "²"])
def test_a_rank_that_is_not_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=f"the rank is '{text}'; allowed are whole numbers from 1 to 64"):
        rank_of(f"power_sgd:{text}")
    assert (rank_of("power_sgd"), rank_of("power_sgd:64")) == (4, 64)


@pytest.mark.parametrize("ranks", [2, 4228, 65536])
def test_equal_factors_are_equal_on_any_number_of_ranks(ranks: int) -> None:
    """The sums of the marks are exact in float32, and one rank of all that differs is found."""
    matrices = plan([("w", (4, 9))], 1)
    (matrix,) = matrices.matrices
    # The CRC-32 of these bytes has all bits, so each digit is the largest one.
    factors = {matrix.key: numpy.full(4, 0xFF, numpy.uint8)}
    assert zlib.crc32(factors[matrix.key].tobytes()) == 2**32 - 1
    marks = _marks(matrices, factors)
    assert marks.dtype == numpy.float32
    sums = numpy.add.accumulate(numpy.tile(marks, (ranks, 1)))[-1]
    _check_marks(ranks, sums)
    assert (sums == ranks * marks.astype(float)).all()
    other = _marks(matrices, {matrix.key: numpy.zeros(4, numpy.uint8)})
    with pytest.raises(MismatchError, match="different factors"):
        _check_marks(ranks, sums - marks + other)
