"""GradientReducer: gradients in, in any order; their sample-weighted mean out; and what a step tells the ranks."""

from __future__ import annotations

import math
import time

import numpy
import pytest
from mpi4py import MPI

import mpitrain.reducer.buckets
from mpitrain import GradientReducer, Parameter, World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.collectives.shares import scale
from mpitrain.errors import ConfigError, DataError, MismatchError
from mpitrain.job.worlds import make_world
from mpitrain.reducer.exchange import PlainExchange

from .common import error_on_all, skip_alone
from .reducers import (
    BFLOAT16,
    BUCKETS,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    PARAMETERS,
    PIECES,
    check_means,
    gradients_of,
    hand_in,
    one_step,
)

pytestmark = pytest.mark.usefixtures("driven")


def test_a_thread_needs_an_mpi_for_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert reducer.num_buckets == BUCKETS[bucket_bytes]
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
        time.sleep(0.3)
        hand_in(reducer, gradients, range(len(PIECES)))
    else:
        hand_in(reducer, gradients, range(len(PIECES)))
        MPI.COMM_WORLD.send(None, 0)
    started = time.perf_counter()
    overlap = reducer.finish().overlap
    waited = time.perf_counter() - started
    assert overlap.exposed_seconds <= waited
    if world.rank == 0:
        assert overlap.compute_seconds >= 0.3
    else:
        assert overlap.exposed_seconds >= 0.05


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


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_calls_in_the_backward_pass_do_not_meet_the_buckets(world: World, algorithm: str) -> None:
    reducer = GradientReducer(world, PIECES, exchange=lambda own: PlainExchange(own, algorithm), bucket_bytes=1)
    late, shift = world.size - 1, (world.size - 1) / 2
    for step in range(3):
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
    for _ in range(3):
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
    """The rank that continues to a mean waits there, and learns from that wait that its step was another one."""
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
