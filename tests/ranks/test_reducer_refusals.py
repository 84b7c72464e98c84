"""GradientReducer: gradients and layouts that cannot be used are errors on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.errors import ConfigError, GradientError, MismatchError, MissingGradientError, NonFiniteError
from mpitrain.reducer.exchange import PlainExchange

from .common import error_on_all, named_ranks, skip_alone
from .reducers import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    HUGE,
    PARAMETERS,
    SMALL,
    TINY,
    check_means,
    gradients_of,
    hand_in,
    one_step,
)

pytestmark = pytest.mark.usefixtures("driven")


def step_with(
    world: World, reducer: GradientReducer, change: Callable[[list[numpy.ndarray]], Any], odd: int, missing: int = -1
) -> None:
    """A step in which rank `odd` has `change`d gradients, and one of them `missing`."""
    mine = gradients_of(world.rank)
    order = list(range(len(mine)))
    if world.rank == odd:
        change(mine)
        order = [index for index in order if index != missing]
    reducer.begin(1.0)
    hand_in(reducer, mine, order[::-1])
    reducer.finish()


@pytest.mark.parametrize(("missing", "bucket_bytes"), [(0, TINY), (3, SMALL), (5, TINY), (9, HUGE)])
def test_a_missing_gradient_is_named_on_every_rank(world: World, missing: int, bucket_bytes: int) -> None:
    reducer = GradientReducer(world, PARAMETERS, bucket_bytes=bucket_bytes)
    for odd in range(world.size):
        text = error_on_all(
            world, MissingGradientError, lambda odd=odd: step_with(world, reducer, lambda _: None, odd, missing)
        )
        assert text.startswith(f"{world.name(odd)} ended its backward pass without the gradient of ")
        assert f"of {PARAMETERS[missing].name};" in text
    one_step(world, reducer)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_after_a_missing_gradient_nothing_is_on_its_way(world: World, algorithm: str) -> None:
    """The others had started most of their buckets, large ones, when the rank that lacks one said so."""
    parameters = [Parameter(f"p{index}", (120_000,), FLOAT64) for index in range(3)]
    reducer = GradientReducer(world, parameters, exchange=lambda own: PlainExchange(own, algorithm), bucket_bytes=1)
    reducer.begin(1.0)
    for index in (2, 1, 0):
        if (world.rank, index) != (world.size - 1, 1):
            reducer.ready(index, numpy.full(120_000, 1e300))
    with pytest.raises(MissingGradientError):
        reducer.finish()
    one_step(world, reducer)


@pytest.mark.parametrize(
    ("index", "value", "bucket_bytes"),
    [(0, math.nan, TINY), (1, math.inf, HUGE), (2, -math.inf, SMALL), (3, -math.inf, TINY), (6, math.nan, HUGE)],
)
def test_a_value_that_is_not_finite_is_named_on_every_rank(
    world: World, index: int, value: float, bucket_bytes: int
) -> None:
    reducer = GradientReducer(world, PARAMETERS, bucket_bytes=bucket_bytes)

    def spoil(gradients: list[numpy.ndarray]) -> None:
        gradients[index][...] = 1
        gradients[index].reshape(-1)[-1] = value

    for odd in range(world.size):
        text = error_on_all(world, NonFiniteError, lambda odd=odd: step_with(world, reducer, spoil, odd))
        assert text.startswith(f"{world.name(odd)}: the gradient of {PARAMETERS[index].name} holds NaN or infinity")
    one_step(world, reducer)


def test_the_lowest_rank_is_named_where_several_have_bad_gradients(world: World, reducer: GradientReducer) -> None:
    skip_alone(world)
    reducer.begin(1.0)
    for index, gradient in enumerate(gradients_of(world.rank)):
        if index == 3 and world.rank == world.size - 2:
            gradient[...] = numpy.nan
        if index != 4 or world.rank != world.size - 1:
            reducer.ready(index, gradient)
    with pytest.raises(NonFiniteError, match=f"^{world.name(world.size - 2)}: the gradient of dense.weight holds"):
        reducer.finish()
    one_step(world, reducer)


def test_large_finite_values_are_fine(world: World) -> None:
    """The sum of their squares is infinite, they are not."""
    values = {FLOAT32: 3e38, FLOAT64: -1.5e308}
    reducer = GradientReducer(world, [Parameter(str(dtype), (10,), dtype) for dtype in values])
    reducer.begin(1.0)
    for index, (dtype, value) in enumerate(values.items()):
        reducer.ready(index, numpy.full(10, value, dtype))
    reducer.finish()
    for gradient, (dtype, value) in zip(reducer.gradients, values.items(), strict=True):
        numpy.testing.assert_allclose(gradient, value, rtol=8 * numpy.finfo(dtype).eps)


def test_calls_that_cannot_be_right(world: World, reducer: GradientReducer) -> None:
    mine = gradients_of(world.rank)
    name = world.name()

    def refused(call: Callable[[], Any], text: str) -> None:
        with pytest.raises(GradientError) as caught:
            call()
        assert str(caught.value) == f"{name}: {text}"

    refused(lambda: reducer.ready(0, mine[0]), "a gradient was handed in before begin()")
    refused(reducer.finish, "finish() without begin()")
    reducer.begin(1.0)
    refused(lambda: reducer.begin(1.0), "begin() was called again without finish()")
    expected = "the parameter is float32 (40, 25)"
    start = "the gradient of embedding is"
    refused(lambda: reducer.ready(0, mine[0].T), f"{start} float32 (25, 40); {expected}")
    refused(lambda: reducer.ready(0, mine[0].astype(float)), f"{start} float64 (40, 25); {expected}")
    refused(lambda: reducer.ready(0, mine[0].astype(">f4")), f"{start} >f4 (40, 25); {expected}")
    refused(lambda: reducer.ready(0, mine[0].tolist()), f"{start} list; {expected}")
    refused(lambda: reducer.ready(10, mine[0]), "there is no parameter 10; there are 10")
    refused(lambda: reducer.ready(-1, mine[7]), "there is no parameter -1; there are 10")
    reducer.ready(0, mine[0])
    refused(lambda: reducer.ready(0, mine[0]), "the gradient of embedding was handed in twice in one step")
    # These refusals have not spoilt the step.
    hand_in(reducer, mine, range(1, len(mine)))
    reducer.finish()
    check_means(world, reducer, [1.0] * world.size)
    refused(lambda: reducer.ready(0, mine[0]), "a gradient was handed in before begin()")


def test_a_rank_that_does_something_else(world: World, reducer: GradientReducer) -> None:
    """Instead of the step, and before its end."""
    skip_alone(world)
    odd = world.size - 1

    def instead() -> None:
        if world.rank == odd:
            world.barrier()
        else:
            reducer.begin(1.0)
            reducer.finish()

    text = error_on_all(world, MismatchError, instead)
    assert text.startswith(f"{world.name(odd)}: barrier; {world.name(0)}: step; ")


USUAL = (Parameter("a", (3,), FLOAT32), Parameter("b", (2, 2), FLOAT64), Parameter("c", (), FLOAT64))


@pytest.mark.parametrize(
    ("other", "bucket_bytes", "text", "usual_text"),
    [
        ((USUAL[0], Parameter("z", (2, 2), FLOAT64), USUAL[2]), 64, "parameter z float64 (2, 2)", "b float64 (2, 2)"),
        ((USUAL[0], Parameter("b", (4,), FLOAT64), USUAL[2]), 64, "parameter b float64 (4,)", "b float64 (2, 2)"),
        ((Parameter("a", (3,), BFLOAT16), *USUAL[1:]), 64, "parameter a bfloat16 (3,)", "a float32 (3,)"),
        ((USUAL[1], USUAL[0], USUAL[2]), 64, "parameter b float64 (2, 2)", "a float32 (3,)"),
        (USUAL[:2], 64, "buckets of 64 bytes", "c float64 ()"),
        ((*USUAL, Parameter("d", (1,), FLOAT64)), 64, "parameter d float64 (1,)", "buckets of 64 bytes"),
        (USUAL, 65, "buckets of 65 bytes", "buckets of 64 bytes"),
        ((), 64, "buckets of 64 bytes", "a float32 (3,)"),
    ],
    ids=["name", "shape", "dtype", "order", "one less", "one more", "bucket size", "none"],
)
def test_different_layouts_are_an_error_on_every_rank(
    world: World, other: tuple[Parameter, ...], bucket_bytes: int, text: str, usual_text: str
) -> None:
    skip_alone(world)
    usual_text = usual_text if usual_text.startswith("buckets") else f"parameter {usual_text}"
    for odd in range(world.size):
        mine, size = (other, bucket_bytes) if world.rank == odd else (USUAL, 64)
        found = error_on_all(
            world, MismatchError, lambda mine=mine, size=size: GradientReducer(world, mine, bucket_bytes=size)
        )
        named, root = named_ranks(world, odd)
        first, second = (text, usual_text) if odd else (usual_text, text)
        assert found.startswith(f"{named}: {first}; {root}: {second}; they must be equal in: compare the gradients'")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ((), "the model has no parameters"),
        ((USUAL[0], USUAL[1], Parameter("a", (1,), FLOAT64)), "two parameters are called a; names must be unique"),
        ((Parameter("n", (3,), numpy.dtype("int32")),), "parameter n is int32; gradients are averaged in float16"),
        ((Parameter("z", (3,), numpy.dtype("complex64")),), "parameter z is complex64"),
    ],
    ids=["none", "same name", "integers", "complex"],
)
def test_parameters_that_cannot_be_averaged(world: World, parameters: tuple[Parameter, ...], text: str) -> None:
    assert error_on_all(world, ConfigError, lambda: GradientReducer(world, parameters)).startswith(text)
