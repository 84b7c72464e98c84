"""GradientReducer: gradients in, in any order; their sample-weighted mean out."""

from __future__ import annotations

import math
import time

import numpy
import pytest
from mpi4py import MPI

import mpitrain.reducer.buckets
from mpitrain import GradientReducer, Parameter, World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.errors import ConfigError, DataError
from mpitrain.reducer.exchange import PlainExchange

from .common import error_on_all, mean_bound, skip_alone
from .reducers import (
    BUCKETS,
    FLOAT32,
    FLOAT64,
    PARAMETERS,
    PIECES,
    SMALL,
    TINY,
    check_means,
    gradients_of,
    hand_in,
    one_step,
)

pytestmark = pytest.mark.usefixtures("driven")


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
    original = mpitrain.reducer.buckets.copy_to_host

    def copy(source: numpy.ndarray, target: numpy.ndarray) -> None:
        copied.append("copy")
        original(source, target)

    monkeypatch.setattr(mpitrain.reducer.buckets, "copy_to_host", copy)
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
