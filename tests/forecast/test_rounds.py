"""Medians and spread; the rounds of a tournament."""

from __future__ import annotations

import pytest

from mpitrain.forecast.cluster_profile import circle_rounds
from mpitrain.forecast.rounds import ratio, spread, versions, versions_line


def test_spread() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([1.0, 2.0]) == pytest.approx((1.5, 1.1, 1.9))
    middle, low, high = spread([float(number) for number in range(101)])
    assert (middle, low, high) == pytest.approx((50.0, 10.0, 90.0))


def test_ratios_are_of_rounds() -> None:
    """Machines change their speed: here everything is ten times slower in the last round."""
    seconds = {"a": [1.0, 1.1, 10.0], "b": [2.0, 2.2, 20.0]}
    assert ratio(seconds, "a", "b") == pytest.approx((0.5, 0.5, 0.5))


def test_versions() -> None:
    found = versions("ml_dtypes")
    assert {"mpitrain", "Python", "mpi4py", "numpy", "ml_dtypes", "MPI", "kernel"} == set(found)
    assert all(text and text == " ".join(text.split()) for text in found.values())
    assert found["MPI"] in versions_line()


@pytest.mark.parametrize("size", range(1, 12))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(size: int) -> None:
    rounds = circle_rounds(size)
    assert len(rounds) == (size - 1 if size % 2 == 0 else size) if size > 1 else rounds in ([], [[]])
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == size * (size - 1) // 2
    assert all(len(pair) == 2 for pair in met)
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
