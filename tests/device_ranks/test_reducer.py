"""GradientReducer with its buckets on the GPU: the means of tests/ranks/test_reducer.py, from device arrays."""

from __future__ import annotations

import gc
from functools import partial

import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World
from mpitrain.errors import ConfigError, GradientError, MismatchError, MissingGradientError, NonFiniteError
from mpitrain.optim import AdamW
from mpitrain.reducer.exchange import PlainExchange, make_exchange
from tests.ranks.common import assert_same_bits, error_on_all, mean_bound, named_ranks, skip_alone
from tests.ranks.placements import placed
from tests.ranks.reducers import HUGE, PARAMETERS, SMALL, TINY, gradients_of

from .transports import FLOAT32, emulated

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

# Both ways to drive it; the thread begins with CUDA's own device and stream.
driven = pytest.mark.parametrize("threaded", [False, True], ids=["called", "threaded"])


def made(world: World, bucket_bytes: int = SMALL, threaded: bool = True) -> GradientReducer:
    exchange = partial(PlainExchange, transport="staged")
    return GradientReducer(
        world, PARAMETERS, exchange=exchange, bucket_bytes=bucket_bytes, on_device=True, threaded=threaded
    )


def step_of(
    world: World, reducer: GradientReducer, weights: list[float] | None = None, step: int = 0, check: bool = True
) -> None:
    """Hand in in another order on every rank, from arrays that are overwritten at once; compare with float64."""
    weights = weights or [1.0] * world.size
    mine = gradients_of(world.rank, step)
    reducer.begin(weights[world.rank])
    for index in numpy.random.default_rng((world.rank, step)).permutation(len(mine)):
        gradient = cupy.asarray(mine[index])
        reducer.ready(int(index), gradient)
        gradient.fill(99)
    reducer.finish()
    if check:
        check_means(world, reducer, weights, step)


def check_means(world: World, reducer: GradientReducer, weights: list[float] | None = None, step: int = 0) -> None:
    weights = weights or [1.0] * world.size
    parts = [gradients_of(rank, step) for rank in range(world.size)]
    for index, parameter in enumerate(PARAMETERS):
        terms = [weight * part[index].astype(numpy.float64) for weight, part in zip(weights, parts, strict=True)]
        exact, magnitude = sum(terms) / sum(weights), sum(abs(term) for term in terms) / sum(weights)
        found = reducer.gradients[index]
        assert isinstance(found, cupy.ndarray)
        error = abs(found.get().astype(numpy.float64) - exact)
        assert (error <= mean_bound(parameter.dtype, world.size, magnitude)).all(), parameter
    assert_same_bits(world, *(flat.get() for flat in reducer.flats.values()))


@driven
@pytest.mark.parametrize("bucket_bytes", [TINY, SMALL, HUGE])
def test_weighted_means_of_all_dtypes(world: World, bucket_bytes: int, threaded: bool) -> None:
    """Also on a stream of the caller's, on which gradients are made and means are read; nobody has to wait for it."""
    reducer = made(world, bucket_bytes, threaded)
    for step in range(3):
        weights = [float(1 + (3 * rank + step) % 5) for rank in range(world.size)]
        if step == 1:
            with cupy.cuda.Stream(non_blocking=True):
                step_of(world, reducer, weights, step)
        else:
            step_of(world, reducer, weights, step)


def test_with_the_transport_that_the_settings_choose(world: World) -> None:
    for bucket_bytes in (SMALL, HUGE):
        reducer = GradientReducer(world, PARAMETERS, bucket_bytes=bucket_bytes, on_device=True)
        for step in range(2):
            step_of(world, reducer, step=step)


def test_exact_means_have_the_bits_of_the_host(world: World) -> None:
    exchange = partial(make_exchange, reduction="exact")
    on_device, on_host = (
        GradientReducer(world, PARAMETERS, exchange=exchange, bucket_bytes=SMALL, on_device=on_device)
        for on_device in (True, False)
    )
    weights = [float(1 + rank) for rank in range(world.size)]
    for step in range(2):
        step_of(world, on_device, weights, step)
        on_host.begin(weights[world.rank])
        for index, gradient in enumerate(gradients_of(world.rank, step)):
            on_host.ready(index, gradient)
        on_host.finish()
        for dtype, flat in on_host.flats.items():
            assert on_device.flats[dtype].get().tobytes() == flat.tobytes()


def test_virtual_ranks_are_refused(world: World) -> None:
    make = partial(GradientReducer, world, PARAMETERS, exchange=partial(make_exchange, reduction="exact"))
    text = error_on_all(world, ConfigError, lambda: make(on_device=True, virtual_ranks=world.size))
    assert text.startswith(f"virtual_ranks={world.size}: the gradients of virtual ranks are added up on the CPU")


def test_a_rank_of_weight_0_does_not_count(world: World) -> None:
    skip_alone(world)
    reducer = made(world)
    mine = [numpy.full_like(its, numpy.nan) for its in gradients_of(world.rank)]
    if world.rank != 1:
        mine = gradients_of(world.rank)
    weights = [0.0 if rank == 1 else 2.0 for rank in range(world.size)]
    reducer.begin(weights[world.rank])
    for index, gradient in enumerate(mine):
        reducer.ready(index, cupy.asarray(gradient))
    assert reducer.finish().is_finite
    check_means(world, reducer, weights)


def test_gradients_computed_in_place(world: World) -> None:
    reducer = made(world)
    reducer.begin(1.0)
    for index, gradient in enumerate(gradients_of(world.rank)):
        reducer.gradients[index][...] = cupy.asarray(gradient)
        reducer.ready(index, reducer.gradients[index])
    reducer.finish()
    check_means(world, reducer)


@pytest.mark.parametrize(("bucket_bytes", "threaded"), [(TINY, True), (HUGE, False)])
def test_a_value_that_is_not_finite_is_named_on_every_rank(world: World, bucket_bytes: int, threaded: bool) -> None:
    reducer = made(world, bucket_bytes, threaded)
    for odd in {0, world.size - 1}:
        for index, parameter in enumerate(PARAMETERS):
            if parameter.count == 0:
                continue
            mine = [its.copy() for its in gradients_of(world.rank)]
            if world.rank == odd:
                mine[index].ravel()[-1] = (numpy.nan, numpy.inf, -numpy.inf)[index % 3]
            reducer.begin(1.0)
            for number, gradient in enumerate(mine):
                reducer.ready(number, cupy.asarray(gradient))
            text = error_on_all(world, NonFiniteError, reducer.finish)
            assert text.startswith(f"{world.name(odd)}: the gradient of {parameter.name} holds NaN or infinity")
    step_of(world, reducer)


def test_a_step_that_may_be_skipped(world: World) -> None:
    reducer = made(world)
    odd = world.size - 1
    for bad in (True, False):
        reducer.begin(1.0, loss_scale=4.0)
        for number, gradient in enumerate(gradients_of(world.rank)):
            scaled = cupy.asarray((gradient.astype(numpy.float64) * 4).astype(gradient.dtype))
            if bad and world.rank == odd:
                scaled.fill(numpy.inf)
            reducer.ready(number, scaled)
        assert reducer.finish(may_skip=True).is_finite is not bad
    check_means(world, reducer)


def test_what_is_handed_in_wrong(world: World) -> None:
    """A gradient is missing on one rank, or lies on the host; the steps after that are as any other."""
    reducer = made(world, TINY)
    for missing in (0, len(PARAMETERS) - 1):
        reducer.begin(1.0)
        for number, gradient in enumerate(gradients_of(world.rank)):
            if number != missing or world.rank:
                reducer.ready(number, cupy.asarray(gradient))
        text = error_on_all(world, MissingGradientError, reducer.finish)
        name = PARAMETERS[missing].name
        assert text.startswith(f"{world.name(0)} ended its backward pass without the gradient of {name}")
        step_of(world, reducer)
    mine = gradients_of(world.rank)
    reducer.begin(1.0)
    with pytest.raises(GradientError, match=r"the gradient of \S+ is on the host; the parameters are on GPU \d"):
        reducer.ready(0, mine[0])
    for number, gradient in enumerate(mine):
        reducer.ready(number, cupy.asarray(gradient))
    reducer.finish()
    check_means(world, reducer)


def test_one_rank_on_the_host(world: World) -> None:
    skip_alone(world)
    for odd in range(world.size):
        text = error_on_all(
            world, MismatchError, lambda odd=odd: GradientReducer(world, PARAMETERS, on_device=world.rank != odd)
        )
        first, second = ("the CPU", "GPUs") if odd else ("GPUs", "the CPU")
        named, root = named_ranks(world, odd)
        assert text.startswith(f"{named}: gradients on {first}; {root}: gradients on {second}")


@emulated
@driven
@pytest.mark.parametrize("compression", ["none", "int8", "power_sgd:2"])
def test_a_step_never_waits_for_the_gpu(
    world: World, monkeypatch: pytest.MonkeyPatch, compression: str, threaded: bool
) -> None:
    """An optimizer with clipping does not wait either. The host looks at events only for MPI and for the vote."""
    there = placed(world, "dealt out over 2 nodes")
    reducer = GradientReducer(
        there,
        [Parameter(name, (200, 201), FLOAT32) for name in "ab"],
        exchange=partial(make_exchange, compression=compression)
        if compression != "none"
        else partial(PlainExchange, transport="staged"),
        bucket_bytes=1000,
        threaded=threaded,
        on_device=True,
    )
    optimizer = AdamW(0.1, clip_norm=0.5)
    optimizer.start(cupy.zeros(2 * 200 * 201, FLOAT32), [slice(0, 100)])
    mine = [cupy.full((200, 201), world.rank + 1, FLOAT32) for _ in range(2)]
    gc.collect()  # what other tests have left waits for the GPU when it ends
    waits: list[str] = []
    for _ in range(2):  # in the first one kernels are compiled
        with monkeypatch.context() as patch:
            for kind, name in ((cupy.cuda.Stream, "_drain"), (cupy.cuda.Event, "synchronize")):
                patch.setattr(kind, name, lambda *_, name=name: waits.append(name))
            reducer.begin(1.0)
            for index, gradient in enumerate(mine):
                reducer.ready(index, gradient)
            reducer.finish()
            optimizer.update(reducer.flats[FLOAT32])
    assert waits == []
    reducer.begin(1.0)
    for index, gradient in enumerate(mine):
        reducer.ready(index, gradient)
    reducer.finish()
    numpy.testing.assert_allclose(reducer.flats[FLOAT32].get(), (world.size + 1) / 2, rtol=1e-5)
