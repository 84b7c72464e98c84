"""GradientReducer: gradients in, in any order; their sample-weighted mean out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy
import pytest
from mpi4py import MPI

import mpitrain.exchange.on_host
from mpitrain import GradientReducer, Parameter, World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.errors import (
    ConfigError,
    DataError,
    GradientError,
    MismatchError,
    MissingGradientError,
    NonFiniteError,
)
from mpitrain.exchange.exchange import PlainExchange, scale
from mpitrain.job.worlds import make_world

from .common import assert_same_bits, error_on_all, mean_bound, named_ranks, skip_alone

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


@pytest.fixture(params=["called", "threaded"], autouse=True)
def driven(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file both ways: with the rule for one node, and with the one for several."""
    monkeypatch.setattr("mpitrain.exchange.driver.threads_by_default", lambda _: request.param == "threaded")


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


def test_number_of_buckets(world: World) -> None:
    for bucket_bytes, number in BUCKETS.items():
        assert GradientReducer(world, PARAMETERS, bucket_bytes=bucket_bytes).num_buckets == number


def test_a_thread_needs_an_mpi_for_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    parameters = [Parameter("a", (3,), numpy.dtype(numpy.float32))]
    text = error_on_all(world, ConfigError, lambda: GradientReducer(world, parameters, threaded=True))
    assert "needs MPI_THREAD_MULTIPLE" in text


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_any_order_gives_the_weighted_mean(world: World, algorithm: str, bucket_bytes: int) -> None:
    reducer = GradientReducer(
        world, PARAMETERS, exchange=lambda own: PlainExchange(own, algorithm), bucket_bytes=bucket_bytes
    )
    for step in range(3):
        weights = [float(1 + (3 * rank + step) % 5) for rank in range(world.size)]
        mine = gradients_of(world.rank, step)
        reducer.begin(weights[world.rank])
        hand_in(reducer, mine, numpy.random.default_rng((world.rank, step, 1)).permutation(len(mine)))
        means = reducer.finish(loss=world.rank + 0.25)
        assert means.weight == sum(weights)
        loss = math.fsum(weight * (rank + 0.25) for rank, weight in enumerate(weights)) / sum(weights)
        assert math.isclose(means.loss, loss, rel_tol=1e-15 * world.size)
        check_means(world, reducer, weights, step)


def test_many_steps(world: World) -> None:
    reducer = GradientReducer(world, PARAMETERS, bucket_bytes=SMALL)
    for step in range(30):
        reducer.begin(1.0)
        for index, parameter in enumerate(PARAMETERS):
            # Whole numbers, the same mean at any number of ranks: exact but for the shares.
            reducer.ready(index, numpy.full(parameter.shape, step % 7, parameter.dtype))
        reducer.finish()
        for parameter, gradient in zip(PARAMETERS, reducer.gradients, strict=True):
            bound = mean_bound(parameter.dtype, world.size, numpy.asarray(float(step % 7)))
            assert (abs(gradient.astype(numpy.float64) - step % 7) <= bound).all()


def test_forwards_and_backwards_at_once(world: World) -> None:
    """Half of the ranks have the first gradients first, the other half the last."""
    reducer = GradientReducer(world, PARAMETERS, bucket_bytes=TINY)
    order = range(len(PARAMETERS))
    reducer.begin(2.0)
    hand_in(reducer, gradients_of(world.rank), order if world.rank % 2 else order[::-1])
    reducer.finish()
    check_means(world, reducer, [2.0] * world.size)


def test_overlap_tells_where_the_time_went(world: World) -> None:
    reducer = GradientReducer(world, PIECES, bucket_bytes=1)
    for _ in range(3):
        started = time.perf_counter()
        reducer.begin(1.0)
        hand_in(reducer, [numpy.ones(20_000, numpy.float32)] * len(PIECES), range(len(PIECES)))
        overlap = reducer.finish().overlap
        ended = time.perf_counter()
        assert overlap.compute_seconds > 0
        assert overlap.exposed_seconds > 0
        assert overlap.compute_seconds + overlap.exposed_seconds <= ended - started
        assert 0 < overlap.wire_seconds <= ended - started
        assert overlap.hidden == max(0.0, 1 - overlap.exposed_seconds / overlap.wire_seconds)


def test_a_rank_that_waits_for_a_slower_one_counts_that_as_exposed(world: World) -> None:
    skip_alone(world)
    reducer = GradientReducer(world, PIECES, bucket_bytes=1)
    reducer.begin(1.0)
    gradients = [numpy.ones(20_000, numpy.float32)] * len(PIECES)
    if world.rank == 0:
        for rank in range(1, world.size):  # all others are about to finish
            MPI.COMM_WORLD.recv(source=rank)
        time.sleep(1.0)
        hand_in(reducer, gradients, range(len(PIECES)))
    else:
        hand_in(reducer, gradients, range(len(PIECES)))
        MPI.COMM_WORLD.send(None, 0)
    started = time.perf_counter()
    overlap = reducer.finish().overlap
    waited = time.perf_counter() - started
    assert overlap.exposed_seconds <= waited
    if world.rank == 0:
        assert overlap.compute_seconds >= 1.0
    else:
        assert overlap.exposed_seconds >= 0.05


def test_large_gradients_through_the_ring(world: World) -> None:
    parameters = [Parameter(f"p{index}", (300, 400), FLOAT32) for index in range(4)]
    reducer = GradientReducer(world, parameters, bucket_bytes=2**20)
    assert reducer.num_buckets == 2
    one_step(world, reducer)


def test_a_rank_of_weight_0_does_not_count(world: World, reducer: GradientReducer) -> None:
    skip_alone(world)
    for idle in {0, world.size // 2, world.size - 1}:
        weights = [0.0 if rank == idle else rank + 1.0 for rank in range(world.size)]
        mine = gradients_of(world.rank)
        if world.rank == idle:
            mine = [numpy.full_like(gradient, numpy.nan) for gradient in mine]
        reducer.begin(weights[world.rank])
        hand_in(reducer, mine, range(len(mine)))
        means = reducer.finish(loss=math.nan if world.rank == idle else 3.0)
        assert math.isclose(means.loss, 3.0, rel_tol=1e-15 * world.size)
        assert means.weight == sum(weights)
        check_means(world, reducer, weights)


def test_weights_of_0_everywhere(world: World, reducer: GradientReducer) -> None:
    def step() -> None:
        reducer.begin(0.0)
        hand_in(reducer, gradients_of(world.rank), range(len(PARAMETERS)))
        reducer.finish()

    assert "the weight is 0 on every rank" in error_on_all(world, DataError, step)
    one_step(world, reducer)


def test_gradients_computed_in_place_are_not_copied(
    world: World, reducer: GradientReducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    original = mpitrain.exchange.on_host.copy_to_host

    def copy(source: numpy.ndarray, target: numpy.ndarray) -> None:
        copied.append("copy")
        original(source, target)

    monkeypatch.setattr(mpitrain.exchange.on_host, "copy_to_host", copy)
    for gradient, flat in ((gradient, reducer.flats[gradient.dtype]) for gradient in reducer.gradients):
        assert gradient.size == 0 or numpy.shares_memory(gradient, flat)
    reducer.begin(1.0)
    for index, gradient in enumerate(gradients_of(world.rank)):
        reducer.gradients[index][...] = gradient
        reducer.ready(index, reducer.gradients[index])
    reducer.finish()
    assert not copied
    check_means(world, reducer, [1.0] * world.size)
    one_step(world, reducer)
    assert len(copied) == len(PARAMETERS)


def test_a_gradient_may_be_overwritten_once_it_is_handed_in(world: World, reducer: GradientReducer) -> None:
    reducer.begin(1.0)
    for index, gradient in enumerate(gradients_of(world.rank)):
        reducer.ready(index, gradient)
        gradient[...] = numpy.nan
    reducer.finish()
    check_means(world, reducer, [1.0] * world.size)


def test_gradients_of_any_memory_order(world: World) -> None:
    parameters = [Parameter("a", (4, 6), FLOAT64), Parameter("b", (3,), FLOAT64), Parameter("c", (), FLOAT64)]
    reducer = GradientReducer(world, parameters)
    reducer.begin(1.0)
    a, b, c = gradients_of(world.rank, 0, parameters)
    reducer.ready(0, numpy.asfortranarray(a))
    reducer.ready(1, numpy.repeat(b, 2)[::2])
    reducer.ready(2, c[()])  # a NumPy scalar, as sums over all dimensions give
    reducer.finish()
    check_means(world, reducer, [1.0] * world.size)


def test_the_flat_buffers_hold_the_parameters_in_order(world: World, reducer: GradientReducer) -> None:
    one_step(world, reducer)
    for dtype, flat in reducer.flats.items():
        its = [gradient.ravel() for gradient in reducer.gradients if gradient.dtype == dtype]
        assert numpy.concatenate(its).tobytes() == flat.tobytes()


# -- gradients that cannot be used --------------------------------------------------------------------------------


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
    parameters = [Parameter("a", (10,), FLOAT32), Parameter("b", (10,), FLOAT64)]
    reducer = GradientReducer(world, parameters)
    reducer.begin(1.0)
    reducer.ready(0, numpy.full(10, 3e38, numpy.float32))
    reducer.ready(1, numpy.full(10, -1.5e308))
    reducer.finish()
    numpy.testing.assert_allclose(reducer.gradients[0], 3e38, rtol=1e-6)
    numpy.testing.assert_allclose(reducer.gradients[1], -1.5e308, rtol=1e-14)


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
    # None of this has spoilt the step.
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


# -- layouts ------------------------------------------------------------------------------------------------------

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


# -- what else goes on meanwhile ----------------------------------------------------------------------------------

PIECES = [Parameter(f"piece {number}", (20_000,), FLOAT32) for number in range(6)]


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_calls_in_the_backward_pass_do_not_meet_the_buckets(world: World, algorithm: str) -> None:
    reducer = GradientReducer(world, PIECES, exchange=lambda own: PlainExchange(own, algorithm), bucket_bytes=1)
    late, shift = world.size - 1, (world.size - 1) / 2
    for step in range(5):
        if world.rank == late:
            time.sleep(0.003)  # so that buckets start at different points of the ranks' programs
        reducer.begin(1.0)
        for index in reversed(range(len(PIECES))):
            reducer.ready(index, numpy.full(20_000, index + 1 + world.rank, numpy.float32))
            mean = world.mean(numpy.full(20_000, 100.0 + step + world.rank))
            assert abs(mean - (100 + step + shift)).max() <= 1e-12
        reducer.finish()
        for index, gradient in enumerate(reducer.gradients):
            assert abs(gradient - (index + 1 + shift)).max() <= 1e-5


def test_two_open_reducers_do_not_meet(world: World) -> None:
    first, second = (GradientReducer(world, PIECES, bucket_bytes=1) for _ in range(2))
    for _ in range(5):
        if world.rank == 0:
            time.sleep(0.002)
        first.begin(1.0)
        second.begin(1.0)
        for index in range(len(PIECES)):
            second.ready(index, numpy.full(20_000, 1000.0, numpy.float32))
            first.ready(index, numpy.full(20_000, 1.0, numpy.float32))
        second.finish()
        first.finish()
        for reducer, value in ((first, 1.0), (second, 1000.0)):
            assert all(abs(gradient - value).max() <= 1e-6 * value for gradient in reducer.gradients)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
def test_scale_rounds_once(dtype: numpy.dtype) -> None:
    values = numpy.random.default_rng(0).standard_normal(2000).astype(dtype)
    for share in (1 / 3, 0.1, 5 / 7):
        flat = values.copy()
        scale(flat, share)
        # The share itself is a float32 number where the product is made in float32.
        exact = share if dtype.itemsize == 8 else float(numpy.float32(share))
        once = (
            (values.astype(numpy.float64) * exact).astype(numpy.float32 if dtype.itemsize < 8 else dtype).astype(dtype)
        )
        assert flat.tobytes() == once.tobytes()


def test_ranks_in_different_steps_hear_of_it_in_another_call(world: World) -> None:
    """The rank that goes on to a mean waits there, and learns from that wait that its step was another one."""
    skip_alone(world)
    own = make_world(world.comm)
    first, second = (GradientReducer(own, [Parameter(name, (3,), FLOAT32)]) for name in "ab")
    mine = first if world.rank else second
    mine.begin(1.0)
    with pytest.raises(MismatchError, match=r"parameter a float32 \(3,\).*parameter b float32 \(3,\).*in: step"):
        if world.rank:
            own.mean(1.0)
        else:
            mine.ready(0, numpy.ones(3, numpy.float32))
            mine.finish()


def test_notes(world: World) -> None:
    """Equal ones stand once; of ranks that differ all are there but those of ranks without samples."""
    reducer = GradientReducer(world, PARAMETERS)

    def notes_of(note: object, weight: float = 1.0) -> tuple[object, ...]:
        reducer.begin(weight)
        hand_in(reducer, gradients_of(world.rank), range(len(PARAMETERS)))
        return reducer.finish(note=note).remarks.notes

    assert notes_of(None) == (None,)
    assert notes_of(("same", b"\0")) == (("same", b"\0"),)
    assert notes_of(["rank", world.rank]) == tuple(["rank", rank] for rank in range(world.size))
    if world.size > 1:
        odd = world.size - 1
        alone = 0.0 if world.rank == odd else 1.0
        assert notes_of(("of", world.rank), alone) == tuple(("of", rank) for rank in range(odd))
        assert notes_of("not heard" if world.rank == odd else None, alone) == (None,)
        assert set(notes_of("heard" if world.rank != odd else None, alone)) == {"heard"}


def test_parameters_that_are_not_used(world: World) -> None:
    """The last one by no rank, the first one by rank 0 alone; a rank without samples uses none and does not count."""
    reducer = GradientReducer(world, PARAMETERS)
    last, odd = len(PARAMETERS) - 1, world.size - 1
    for counted in (world.size, max(odd, 1)):  # ranks with samples
        weight = 3.0 if world.rank < counted else 0.0
        reducer.begin(weight)
        for index, parameter in enumerate(PARAMETERS):
            used = weight > 0 and index != last and (index != 0 or world.rank == 0)
            value = numpy.full(parameter.shape, 1 + world.rank).astype(parameter.dtype)
            reducer.ready(index, value if used else None)
        means = reducer.finish()
        assert means.remarks.unused == {last}
        assert means.remarks.partly_used == ({0} if counted > 1 else set())
        assert not reducer.gradients[last].any()
        # Each rank's share is rounded once, and each of the sums: float32 and float64.
        for index, total in ((0, 1), (1, counted * (counted + 1) / 2)):
            numpy.testing.assert_allclose(reducer.gradients[index].astype("f8"), total / counted, rtol=5 * 2.0**-23)


def test_turns(world: World) -> None:
    """Ranks at different batches do not add up their gradients."""
    reducer = GradientReducer(world, PARAMETERS)
    reducer.begin(1, turn=7)
    hand_in(reducer, gradients_of(world.rank), range(len(PARAMETERS)))
    reducer.finish()
    if world.size > 1:
        odd = world.size - 1

        def step() -> None:
            reducer.begin(1, turn=8 + (world.rank == odd))
            hand_in(reducer, gradients_of(world.rank), range(len(PARAMETERS)))
            reducer.finish()

        text = error_on_all(world, MismatchError, step)
        assert f"{world.name(odd)} exchanges the gradients of batch 9; {world.name(0)}: those of batch 8" in text
    one_step(world, reducer)
