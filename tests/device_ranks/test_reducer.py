"""GradientReducer with its buckets on the GPU: the means of tests/ranks/test_reducer.py, from device arrays."""

from __future__ import annotations

import gc
from functools import partial

import numpy
import pytest

from mpitrain import GradientReducer, World
from mpitrain.errors import ConfigError, DeviceError, GradientError, MismatchError, MissingGradientError, NonFiniteError
from mpitrain.optim import AdamW
from mpitrain.reducer.exchange import PlainExchange, make_exchange
from tests.ranks.common import assert_same_bits, error_on_all, mean_bound, named_ranks, skip_alone
from tests.ranks.reducers import BUCKETS, HUGE, PARAMETERS, SMALL, TINY, gradients_of

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture(params=[False, True], ids=["called", "threaded"], autouse=True)
def threaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test both ways; the thread begins with CUDA's own device and stream."""
    monkeypatch.setattr("mpitrain.reducer.driver.threads_by_default", lambda world: request.param)
    return bool(request.param)


def made(world: World, bucket_bytes: int = SMALL) -> GradientReducer:
    return GradientReducer(
        world,
        PARAMETERS,
        exchange=lambda own: PlainExchange(own, transport="staged"),
        bucket_bytes=bucket_bytes,
        on_device=True,
    )


def step_of(world: World, reducer: GradientReducer, weights: list[float], step: int = 0) -> None:
    """Hand in in another order on every rank, from arrays that are overwritten at once."""
    mine = gradients_of(world.rank, step)
    reducer.begin(weights[world.rank])
    for index in numpy.random.default_rng((world.rank, step)).permutation(len(mine)):
        gradient = cupy.asarray(mine[index])
        reducer.ready(int(index), gradient)
        gradient.fill(99)
    reducer.finish()


def check(world: World, reducer: GradientReducer, weights: list[float], step: int = 0) -> None:
    parts = [gradients_of(rank, step) for rank in range(world.size)]
    for index, parameter in enumerate(PARAMETERS):
        terms = [weight * part[index].astype(numpy.float64) for weight, part in zip(weights, parts, strict=True)]
        exact, magnitude = sum(terms) / sum(weights), sum(abs(term) for term in terms) / sum(weights)
        found = reducer.gradients[index]
        assert isinstance(found, cupy.ndarray)
        error = abs(found.get().astype(numpy.float64) - exact)
        assert (error <= mean_bound(parameter.dtype, world.size, magnitude)).all(), parameter
    assert_same_bits(world, *(flat.get() for flat in reducer.flats.values()))


@pytest.mark.parametrize("bucket_bytes", [SMALL, HUGE])
def test_with_the_transport_that_the_settings_choose(world: World, bucket_bytes: int) -> None:
    reducer = GradientReducer(world, PARAMETERS, bucket_bytes=bucket_bytes, on_device=True)
    for step in range(3):
        step_of(world, reducer, [1.0] * world.size, step)
        check(world, reducer, [1.0] * world.size, step)


def test_exact_means_have_the_bits_of_the_host(world: World) -> None:
    exchange = partial(make_exchange, reduction="exact")
    on_device, on_host = (
        GradientReducer(world, PARAMETERS, exchange=exchange, bucket_bytes=SMALL, on_device=on_device)
        for on_device in (True, False)
    )
    weights = [float(1 + rank) for rank in range(world.size)]
    for step in range(2):
        step_of(world, on_device, weights, step)
        check(world, on_device, weights, step)
        on_host.begin(weights[world.rank])
        for index, gradient in enumerate(gradients_of(world.rank, step)):
            on_host.ready(index, gradient)
        on_host.finish()
        for dtype, flat in on_host.flats.items():
            assert on_device.flats[dtype].get().tobytes() == flat.tobytes()


def test_virtual_ranks_are_refused(world: World) -> None:
    make = partial(GradientReducer, world, PARAMETERS, exchange=partial(make_exchange, reduction="exact"))
    text = error_on_all(world, ConfigError, lambda: make(on_device=True, virtual_ranks=world.size))
    assert text.startswith(f"virtual_ranks={world.size}: the gradients of virtual ranks are added up on the host")


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_weighted_means_of_all_dtypes(world: World, bucket_bytes: int) -> None:
    reducer = made(world, bucket_bytes)
    for step in range(3):
        weights = [float(1 + (3 * rank + step) % 5) for rank in range(world.size)]
        step_of(world, reducer, weights, step)
        check(world, reducer, weights, step)


def test_on_a_stream_of_the_callers(world: World) -> None:
    """Gradients are made and means are read on it; nobody has to wait for it."""
    reducer = made(world, TINY)
    weights = [1.0] * world.size
    for step in range(2):
        with cupy.cuda.Stream(non_blocking=True):
            step_of(world, reducer, weights, step)
            check(world, reducer, weights, step)


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
    check(world, reducer, weights)


def test_gradients_computed_in_place(world: World) -> None:
    reducer = made(world)
    reducer.begin(1.0)
    for index, gradient in enumerate(gradients_of(world.rank)):
        reducer.gradients[index][...] = cupy.asarray(gradient)
        reducer.ready(index, reducer.gradients[index])
    reducer.finish()
    check(world, reducer, [1.0] * world.size)


@pytest.mark.parametrize("bucket_bytes", [TINY, HUGE])
@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf], ids=str)
def test_a_value_that_is_not_finite_is_named_on_every_rank(world: World, value: float, bucket_bytes: int) -> None:
    reducer = made(world, bucket_bytes)
    for odd in {0, world.size - 1}:
        for index, parameter in enumerate(PARAMETERS):
            if parameter.count == 0:
                continue
            mine = [its.copy() for its in gradients_of(world.rank)]
            if world.rank == odd:
                mine[index].ravel()[-1] = value
            reducer.begin(1.0)
            for number, gradient in enumerate(mine):
                reducer.ready(number, cupy.asarray(gradient))
            text = error_on_all(world, NonFiniteError, reducer.finish)
            assert text.startswith(f"{world.name(odd)}: the gradient of {parameter.name} holds NaN or infinity")
    step_of(world, reducer, [1.0] * world.size)
    check(world, reducer, [1.0] * world.size)


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
    check(world, reducer, [1.0] * world.size)


@pytest.mark.parametrize("missing", [0, len(PARAMETERS) - 1])
def test_a_missing_gradient(world: World, missing: int) -> None:
    reducer = made(world, TINY)
    reducer.begin(1.0)
    for number, gradient in enumerate(gradients_of(world.rank)):
        if number != missing or world.rank:
            reducer.ready(number, cupy.asarray(gradient))
    text = error_on_all(world, MissingGradientError, reducer.finish)
    assert text.startswith(
        f"{world.name(0)} ended its backward pass without the gradient of {PARAMETERS[missing].name}"
    )
    step_of(world, reducer, [1.0] * world.size)
    check(world, reducer, [1.0] * world.size)


def test_a_host_array_where_a_device_array_belongs(world: World) -> None:
    reducer = made(world)
    mine = gradients_of(world.rank)
    reducer.begin(1.0)
    with pytest.raises(GradientError, match=r"the gradient of \S+ is on the host; the parameters are on GPU \d"):
        reducer.ready(0, mine[0])
    for number, gradient in enumerate(mine):
        reducer.ready(number, cupy.asarray(gradient))
    reducer.finish()
    check(world, reducer, [1.0] * world.size)


def test_one_rank_on_the_host(world: World) -> None:
    skip_alone(world)
    for odd in range(world.size):
        text = error_on_all(
            world, MismatchError, lambda odd=odd: GradientReducer(world, PARAMETERS, on_device=world.rank != odd)
        )
        first, second = ("the host", "GPUs") if odd else ("GPUs", "the host")
        named, root = named_ranks(world, odd)
        assert text.startswith(f"{named}: gradients on {first}; {root}: gradients on {second}")


@pytest.mark.skipif("emulated" not in cupy.__version__, reason="a real GPU cannot be filled for a test")
@pytest.mark.parametrize(("free", "text"), [(0, "a bucket"), (None, "the flags of a reducer's buckets")])
def test_no_memory_for_its_own_buffers(
    world: World, monkeypatch: pytest.MonkeyPatch, free: int | None, text: str
) -> None:
    """One rank has no memory. All ranks raise the same error, and go on."""
    gc.collect()
    taken = sum(parameter.count * parameter.dtype.itemsize for parameter in PARAMETERS)
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            used = cupy.cuda._used.get(cupy.cuda.Device().id, 0)
            patch.setenv("EMULATED_GPU_BYTES", str(used + (taken if free is None else free)))
        said = error_on_all(world, DeviceError, lambda: made(world))
    assert said.startswith(f"{world.name(world.size - 1)}: GPU ")
    assert f" bytes for {text}: " in said
    assert "MPITRAIN_BUCKET_MIB" in said
    reducer = made(world)
    step_of(world, reducer, [1.0] * world.size)
    check(world, reducer, [1.0] * world.size)


@pytest.mark.skipif("emulated" not in cupy.__version__, reason="counts in the emulation")
def test_a_step_never_waits_for_the_gpu(world: World, monkeypatch: pytest.MonkeyPatch, threaded: bool) -> None:
    """An optimizer with clipping does not wait either. The host looks at events only for MPI and for the vote."""
    reducer = made(world)
    optimizers = {numpy.dtype(name): AdamW(0.1, clip_norm=0.5) for name in ("float32", "float64")}
    for dtype, optimizer in optimizers.items():
        optimizer.start(cupy.zeros(reducer.layout.counts[dtype], dtype), [slice(0, 100)])
    gc.collect()  # what other tests have left waits for the GPU when it ends
    waits = []
    mine = [cupy.asarray(gradient) for gradient in gradients_of(world.rank)]
    for step in range(2):  # in the first one kernels are compiled
        with monkeypatch.context() as patch:
            for kind, name in ((cupy.cuda.Stream, "_drain"), (cupy.cuda.Event, "synchronize")):
                patch.setattr(kind, name, lambda *_, step=step, name=name: waits.append((step, name)))
            reducer.begin(1.0)
            for index, gradient in enumerate(mine):
                reducer.ready(index, gradient)
            reducer.finish()
            for dtype, optimizer in optimizers.items():
                optimizer.update(reducer.flats[dtype])
    assert waits == []
    reducer.begin(1.0)
    for index, gradient in enumerate(mine):
        reducer.ready(index, gradient)
    reducer.finish()
    check(world, reducer, [1.0] * world.size)
