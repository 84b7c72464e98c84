"""Sketches tell how far apart arrays are; hashes recognise samples."""

from __future__ import annotations

import math

import numpy
import pytest

from mpitrain.errors import DataError
from mpitrain.verify.fingerprint import NUM_PROJECTIONS, distance, sample_hashes, sketch


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 2**16, 2**16 + 3, 200_000])
@pytest.mark.parametrize("apart", [0.0, 1e-6, 1.0])
def test_distance(count: int, apart: float) -> None:
    random = numpy.random.default_rng(count)
    one = random.standard_normal(count)
    other = one + apart * random.standard_normal(count)
    true = float(numpy.linalg.norm(one - other))
    found = distance(sketch("w", one), sketch("w", other))
    # Every projection of one element is exact.
    assert true * (0.3 if count > 1 else 0.999) <= found <= true * 2.5 + 1e-12
    assert sketch("w", one)["norm"] == pytest.approx(float(numpy.linalg.norm(one)), rel=1e-12)


def test_the_projections_are_by_signs_of_even_chance() -> None:
    """Of the unit vectors each projection is +1 or -1, and the vectors of signs are almost orthogonal."""
    count = 400
    signs = numpy.array([sketch("w", row)["projections"] for row in numpy.eye(count)])
    assert set(numpy.unique(signs)) == {-1.0, 1.0}
    products = signs.T @ signs / count
    assert numpy.abs(products - numpy.eye(NUM_PROJECTIONS)).max() < 0.25


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_a_sketch_is_of_the_values_whatever_the_form(dtype: str) -> None:
    array = numpy.arange(24).reshape(4, 6).astype(dtype)
    found = sketch("w", array.T)
    assert found == sketch("w", numpy.ascontiguousarray(array.T).ravel())
    assert (found["dtype"], found["count"]) == (dtype, 24)
    assert found["projections"] != sketch("w", array)["projections"]
    assert sketch("w", numpy.float64(2.0))["norm"] == 2.0


def test_a_number_is_a_float32_to_whoever_compares() -> None:
    assert sketch("loss", 0.5)["dtype"] == "float32"
    assert sketch("loss", 0.5)["norm"] == 0.5


def test_sample_hashes() -> None:
    batch = {"x": numpy.arange(6.0).reshape(3, 2), "y": [numpy.array([1, 2, 1])]}
    found = sample_hashes(batch)
    assert len(set(found)) == 3
    assert sample_hashes({"x": batch["x"][1:], "y": [batch["y"][0][1:]]}) == found[1:]
    assert sample_hashes({"x": batch["x"], "y": [numpy.array([1, 3, 1])]})[::2] == found[::2]
    assert sample_hashes(numpy.zeros((0, 3))) == []
    with pytest.raises(DataError):
        sample_hashes((numpy.zeros(3), numpy.zeros(4)))


@pytest.mark.parametrize("size", [1e-180, 1e30, 1e180, 4e307])
def test_norms_do_not_overflow(size: float) -> None:
    """They do not overflow across blocks of 2^16 elements either, or beside a block of zeros."""
    array = numpy.zeros(3 * 2**16)
    array[[1, 2, 2**17 + 1, 2**17 + 2]] = size
    found = sketch("w", array)
    assert math.isclose(found["norm"], 2 * size, rel_tol=1e-6)
    assert found["norm"] > 0
    assert all(value in (-4, -2, 0, 2, 4) for value in numpy.divide(found["projections"], size).round(6))
    assert distance(found, sketch("w", array)) == 0.0
