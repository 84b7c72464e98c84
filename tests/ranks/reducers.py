"""A small model's parameters and gradients, and reducers of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World

from .common import assert_same_bits, mean_bound

FLOAT16, FLOAT32, FLOAT64 = (numpy.dtype(name) for name in ("float16", "float32", "float64"))


BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)


PARAMETERS = (
    Parameter("embedding", (40, 25), FLOAT32),
    Parameter("scale", (), FLOAT64),
    Parameter("half", (5, 3), BFLOAT16),
    Parameter("dense.weight", (7, 30), FLOAT64),
    Parameter("dense.bias", (30,), FLOAT32),
    Parameter("empty", (0, 4), FLOAT32),
    Parameter("other half", (2, 2, 3), FLOAT16),
    Parameter("head", (9, 11), FLOAT32),
    Parameter("head.bias", (5,), FLOAT32),
    Parameter("head.scale", (60,), FLOAT32),
)


TINY, SMALL, HUGE = 1, 250, 2**22


# How many buckets these sizes make; an empty gradient fills none, and every change of dtype begins a new one.
BUCKETS = {TINY: 9, SMALL: 8, HUGE: 7}


@pytest.fixture(params=["called", "threaded"])
def driven(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test of the reducer both ways: with the rule for one node, and with the one for several."""
    monkeypatch.setattr("mpitrain.reducer.driver.threads_by_default", lambda _: request.param == "threaded")


def gradients_of(rank: int, step: int = 0, parameters: Sequence[Parameter] = PARAMETERS) -> list[numpy.ndarray]:
    rng = numpy.random.default_rng((rank, step))
    return [numpy.asarray(rng.standard_normal(p.shape)).astype(p.dtype) for p in parameters]


def check_means(world: World, reducer: GradientReducer, weights: Sequence[float], step: int = 0) -> None:
    """Against the mean of all ranks' gradients in float64, and between the ranks bit by bit."""
    total = math.fsum(weights)
    parts = [gradients_of(rank, step, reducer.layout.parameters) for rank in range(world.size)]
    for index, parameter in enumerate(reducer.layout.parameters):
        terms = [weight * part[index].astype(numpy.float64) for weight, part in zip(weights, parts, strict=True)]
        exact, magnitude = sum(terms) / total, sum(abs(term) for term in terms) / total
        error = abs(reducer.gradients[index].astype(numpy.float64) - exact)
        assert (error <= mean_bound(parameter.dtype, world.size, magnitude)).all(), parameter
    assert_same_bits(world, *reducer.flats.values())


def hand_in(reducer: GradientReducer, gradients: Sequence[numpy.ndarray], order: Sequence[int]) -> None:
    for index in order:
        reducer.ready(int(index), gradients[index])


def one_step(world: World, reducer: GradientReducer, step: int = 0) -> None:
    """A good step, as a proof that all is well."""
    weights = [rank + 1.0 for rank in range(world.size)]
    reducer.begin(weights[world.rank])
    mine = gradients_of(world.rank, step, reducer.layout.parameters)
    hand_in(reducer, mine, numpy.random.default_rng((world.rank, step)).permutation(len(mine)))
    reducer.finish()
    check_means(world, reducer, weights, step)


@pytest.fixture(params=[TINY, SMALL, HUGE], ids=["tiny", "small", "huge"])
def reducer(request: pytest.FixtureRequest, world: World) -> GradientReducer:
    return GradientReducer(world, PARAMETERS, bucket_bytes=request.param)


PIECES = [Parameter(f"piece {number}", (20_000,), FLOAT32) for number in range(6)]
