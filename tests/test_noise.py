"""What counts as faster: by more than 2 %, and by more than two standard errors."""

from __future__ import annotations

import numpy
import pytest

from mpitrain.noise import error_of_mean, median_and_error, noise


def test_noise() -> None:
    assert noise(1.0) == 0.02
    assert noise(1.0, 0.03, 0.04) == pytest.approx(0.1)
    assert median_and_error([3.0]) == (3.0, 0.0)
    assert error_of_mean([3.0]) == 0.0
    random = numpy.random.default_rng(0)
    many = random.normal(10, 2, (2000, 101))
    assert numpy.median([median_and_error(row.tolist())[1] for row in many]) == pytest.approx(
        numpy.median(many, axis=1).std(), rel=0.1
    )
    assert numpy.mean([error_of_mean(row.tolist()) for row in many]) == pytest.approx(many.mean(axis=1).std(), rel=0.1)
