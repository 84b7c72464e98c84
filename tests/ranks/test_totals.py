"""Sums of a few numbers of all ranks: no division of the numbers between the ranks changes them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest

from mpitrain import World, evaluate
from mpitrain.collectives.shares import exact_total, rounded_sum
from mpitrain.world.shard import part_of

HUGE, TINY = 1e308, 5e-324  # twice the first is beyond float64; nothing is smaller than the second


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([1.0, 2.0**-80, -1.0], 2.0**-80),
        ([1.0, 2.0**-53, TINY], 1.0 + 2.0**-52),  # above a tie by the smallest number
        ([TINY] * 7, 7 * TINY),
        ([HUGE, HUGE, -HUGE, -HUGE, TINY], TINY),
        ([HUGE, HUGE, -HUGE], HUGE),
        ([-HUGE, -HUGE, 1.0], -math.inf),
        ([HUGE, HUGE, -math.inf], -math.inf),
        ([HUGE, math.inf, HUGE], math.inf),
        ([math.inf, 1.0, -math.inf], math.nan),
        ([math.inf, math.nan], math.nan),
    ],
    ids=str,
)
def test_a_sum_is_the_same_on_any_number_of_ranks(world: World, values: list[float], expected: float) -> None:
    own = values[part_of(len(values), world.rank, world.size)]
    for total in (exact_total(world, own), rounded_sum(values), rounded_sum(values[::-1])):
        assert total == expected or (math.isnan(total) and math.isnan(expected))
    on_the_last = values if world.rank == world.size - 1 else []
    assert repr(exact_total(world, on_the_last)) == repr(exact_total(world, own))


def test_many_numbers_of_any_size(world: World) -> None:
    rng = numpy.random.default_rng(4)
    values = numpy.ldexp(rng.standard_normal(301), rng.integers(-1074, 1020, 301)).tolist()
    own = values[part_of(len(values), world.rank, world.size)]
    assert exact_total(world, own) == float(sum(map(Fraction, values)))


def test_an_evaluation_with_infinite_values(world: World) -> None:
    """Of both signs, in different calls."""

    def metrics(batch: numpy.ndarray) -> dict[str, float]:
        return {"both": float(batch.mean()), "one": abs(float(batch.mean()))}

    samples = numpy.array([math.inf] * 4 + [-math.inf] * 4)
    means = evaluate(world, metrics, samples, samples_at_once=1, virtual_ranks=4)
    assert math.isnan(means["both"])
    assert means["one"] == math.inf
