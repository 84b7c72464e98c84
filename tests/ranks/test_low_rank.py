"""PowerSGD between ranks: by hand, against float64, what stays, what is sent, and what a resume continues from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import Sync, World
from mpitrain.compression.power_sgd import Matrix, first_factor
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MismatchError, NonFiniteError
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.low_rank import LowRankExchange
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.reducer.slot import Slot
from mpitrain.state.names import host_copy, split

from .common import assert_same_bits, error_on_all, skip_alone
from .placements import PLACEMENTS, placed
from .test_gathered import Counting
from .test_strategies import adapter, train

FLOAT32 = numpy.dtype(numpy.float32)
TENSORS = [("bias", (7,)), ("w", (40, 30)), ("small", (2, 2)), ("kernel", (16, 3, 5, 5)), ("scale", ())]
COUNT = 7 + 1200 + 4 + 1200 + 1
MATRICES = {"w": (7, 40, 30), "kernel": (1211, 16, 75)}


@pytest.fixture(params=PLACEMENTS)
def there(request: pytest.FixtureRequest, world: World) -> World:
    return placed(world, request.param)


@pytest.fixture
def alone(world: World) -> World:
    skip_alone(world)
    return placed(world, "alone on each node")


def inputs(rank: int, step: int) -> numpy.ndarray:
    return numpy.random.default_rng((rank, step)).standard_normal(COUNT).astype(numpy.float32)


def reference(ranks: int, steps: int, rank: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The last sum, and what is left out on each rank, by the paper's algorithm in float64, with NumPy's QR."""
    left = numpy.zeros((ranks, COUNT))
    factors = {name: first_factor(Matrix(name, 0, m, n, rank)).astype(float).T for name, (_, m, n) in MATRICES.items()}
    for step in range(steps):
        deltas = left + [inputs(one, step) for one in range(ranks)]
        left, total = numpy.zeros_like(left), deltas.sum(axis=0)
        for name, (begin, m, n) in MATRICES.items():
            part = slice(begin, begin + m * n)
            each = deltas[:, part].reshape(ranks, m, n)
            p, _ = numpy.linalg.qr((each @ factors[name]).sum(axis=0))
            own = each.transpose(0, 2, 1) @ p
            factors[name] = numpy.linalg.qr(own.sum(axis=0))[0]
            total[part] = (p @ own.sum(axis=0).T).ravel()
            left[:, part] = (each - p @ own.transpose(0, 2, 1)).reshape(ranks, -1)
    return total, left


def summed(there: World, *steps: numpy.ndarray, spec: str = "power_sgd:2", part: slice = slice(None)) -> Slot:
    """The slot after the sums of these values."""
    exchange = LowRankExchange(there, spec)
    slot = exchange.allocate(COUNT, FLOAT32, tensors=TENSORS)
    for values in steps:
        slot.flat[:] = values
        exchange.mean(slot, part, 1.0).wait()
    return slot


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_sums_are_those_of_the_paper(there: World, rank: int, steps: int) -> None:
    """The space of P is the same however it is made orthogonal, and so are P Q^T and what is left out."""
    slot = summed(there, *(inputs(there.rank, step) for step in range(steps)), spec=f"power_sgd:{rank}")
    assert_same_bits(there, slot.flat)
    if there.num_nodes == 1:
        expected = sum(inputs(one, steps - 1).astype(float) for one in range(there.size))
        numpy.testing.assert_allclose(slot.flat, expected, rtol=0, atol=there.size**2 * 2.0**-21)
        assert slot.left_out() is None
        return
    total, left = reference(there.size, steps, rank)
    # float32 with sums of up to 75 products of values around 5: 2e-5 at most, grown by the orthogonalisations.
    numpy.testing.assert_allclose(slot.flat, total, rtol=0, atol=2e-4 * there.size)
    numpy.testing.assert_allclose(slot.left_out(), left[there.rank], rtol=0, atol=2e-4 * there.size)
    assert abs(left).max() > 1


def test_what_is_left_out_comes_later(there: World) -> None:
    exchange = LowRankExchange(there, "power_sgd:2")
    slot = exchange.allocate(COUNT, FLOAT32, tensors=TENSORS)
    came_out, went_in = numpy.zeros(COUNT), numpy.zeros(COUNT)
    for step in range(5):
        slot.flat[:] = inputs(there.rank, step)
        exchange.mean(slot, slice(None), 1.0).wait()
        came_out += slot.flat
        went_in += sum(inputs(rank, step).astype(numpy.float64) for rank in range(there.size))
    left_out = slot.left_out()
    kept = there.sum(numpy.zeros(COUNT) if left_out is None else left_out.astype(numpy.float64))
    numpy.testing.assert_allclose(came_out + kept, went_in, rtol=0, atol=5 * 40 * there.size * 2.0**-21)
    if there.num_nodes > 1:
        assert abs(kept).max() > 1
        # Vectors and small matrices are sent as they are.
        assert not any(kept[part].any() for part in (slice(7), slice(1207, 1211), slice(2411, None)))


def test_by_hand(alone: World) -> None:
    """The example of power_sgd.py: rank r has 2 r + 1 times u v^T. A sum of rank 1 is exact."""
    u, v = numpy.array([3, 4, 0, 0], numpy.float32), numpy.array([1, 2, 2, 0], numpy.float32)
    exchange = LowRankExchange(alone, "power_sgd:1")
    slot = exchange.allocate(16, FLOAT32, tensors=[("m", (4, 4))])
    assert slot.factors is not None
    slot.factors["m"] = numpy.array([[1, 0, 0, 0]], numpy.float32)
    slot.flat[:] = (2 * alone.rank + 1) * numpy.outer(u, v).ravel()
    exchange.mean(slot, slice(None), 1.0).wait()
    total = alone.size**2  # of 1, 3, 5, ...
    numpy.testing.assert_allclose(slot.flat.reshape(4, 4), total * numpy.outer(u, v), rtol=2.0**-21)
    numpy.testing.assert_allclose(slot.factors["m"], [[1 / 3, 2 / 3, 2 / 3, 0]], rtol=2.0**-22)
    left_out = slot.left_out()
    assert left_out is not None
    assert abs(left_out).max() <= 8 * (2 * alone.rank + 1) * 2.0**-21


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf])
def test_not_a_number_does_not_stay(alone: World, value: float) -> None:
    exchange = LowRankExchange(alone, "power_sgd")
    slot = exchange.allocate(COUNT, FLOAT32, tensors=TENSORS)
    slot.flat[:] = 1
    if alone.rank == alone.size - 1:
        slot.flat[100] = value
    exchange.mean(slot, slice(None), 1.0).wait()
    assert numpy.isnan(slot.flat[7:1207]).all()
    assert numpy.isfinite(slot.flat[1207:]).all()
    slot.flat[:] = 1
    exchange.mean(slot, slice(None), 1.0).wait()
    assert numpy.isfinite(slot.flat).all()


def test_after_a_gradient_of_0_the_factors_are_those_of_a_first_step(alone: World) -> None:
    one = inputs(alone.rank, 0)
    assert summed(alone, numpy.zeros(COUNT), one).flat.tobytes() == summed(alone, one).flat.tobytes()


def test_after_a_reset_it_is_a_first_step(alone: World) -> None:
    """The residuals and the factors belong to a step that was not made."""
    exchange = LowRankExchange(alone, "power_sgd:2")
    slot = exchange.allocate(COUNT, FLOAT32, tensors=TENSORS)
    for step in (1, 0):
        exchange.reset()
        slot.flat[:] = inputs(alone.rank, step)
        exchange.mean(slot, slice(None), 1.0).wait()
    assert slot.flat.tobytes() == summed(alone, inputs(alone.rank, 0)).flat.tobytes()


def test_what_is_sent_as_it_is(alone: World) -> None:
    """A part of a tensor."""
    slot = summed(alone, inputs(alone.rank, 0), part=slice(3, 1000))
    expected = sum(inputs(rank, 0)[3:1000].astype(float) for rank in range(alone.size))
    numpy.testing.assert_allclose(slot.flat[3:1000], expected, rtol=0, atol=alone.size**2 * 2.0**-21)
    assert (slot.flat[1000:] == inputs(alone.rank, 0)[1000:]).all()


def test_what_is_sent(alone: World) -> None:
    """By direct, 2 (p - 1) / p of both sums: m r + r n values for each matrix, the others, and the check of factors."""
    if alone.size > 4:
        pytest.skip("the numbers are for parts of equal length")
    Counting.sent = 0
    exchange = LowRankExchange(alone.replaced(comm=Counting(alone.comm)), "power_sgd:2", "direct")
    # 12 divides every number of values that is sent.
    slot = exchange.allocate(48 * 36 + 20, FLOAT32, tensors=[("w", (48, 36)), ("bias", (20,))])
    slot.flat[:] = 1
    exchange.mean(slot, slice(None), 1.0).wait()
    values = (2 * 48 + 20 + 16) + 2 * 36
    assert Counting.sent == 2 * (alone.size - 1) * 4 * values // alone.size


def test_means_are_by_samples(alone: World) -> None:
    """Of matrices of rank 1, which are exact: rank r has r + 1 samples. A rank of weight 0 hands in nothing."""
    ones = numpy.outer(numpy.arange(1, 9), numpy.arange(1, 7)).astype(numpy.float32)
    parameters = [Parameter("w", (8, 6), FLOAT32), Parameter("b", (5,), FLOAT32)]
    reducer = GradientReducer(alone, parameters, exchange=lambda own: make_exchange(own, compression="power_sgd:2"))
    for zero in (False, True):
        weights = [0 if zero and rank == alone.size - 1 else rank + 1 for rank in range(alone.size)]
        reducer.begin(weights[alone.rank])
        value = numpy.float32(numpy.nan if weights[alone.rank] == 0 else alone.rank)
        reducer.ready(0, value * ones)
        reducer.ready(1, numpy.full(5, value, numpy.float32))
        reducer.finish()
        mean = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
        numpy.testing.assert_allclose(reducer.gradients[0], mean * ones, rtol=1e-5, atol=1e-5)
        numpy.testing.assert_allclose(reducer.gradients[1], mean, rtol=1e-6)


def test_the_error_names_rank_and_parameter(alone: World) -> None:
    reducer = GradientReducer(
        alone, [Parameter("w", (8, 60), FLOAT32)], exchange=lambda own: make_exchange(own, compression="power_sgd:2")
    )
    plain = numpy.outer(numpy.arange(8), numpy.arange(60)).astype(numpy.float32)

    def step(value: float, everywhere: bool = False) -> bytes:
        gradient = numpy.full_like(plain, value) if everywhere else plain.copy()
        gradient[3, 3] = value if alone.rank == alone.size - 1 else 1
        reducer.begin(1.0)
        reducer.ready(0, gradient)
        reducer.finish()
        return bytes(reducer.flats[FLOAT32].tobytes())

    first = step(1)
    text = error_on_all(alone, NonFiniteError, lambda: step(numpy.nan))
    assert alone.name(alone.size - 1) in text
    assert "w" in text
    assert step(1) == first  # nothing of the steps before is left
    # Finite, but M Q is not: Q is that of `plain`, whose columns grow.
    text = error_on_all(alone, NonFiniteError, lambda: step(3e38, everywhere=True))
    assert "w" in text


def test_what_is_refused(alone: World) -> None:
    exchange = LowRankExchange(alone, "power_sgd:2")
    slot = exchange.allocate(COUNT, FLOAT32, tensors=TENSORS)
    slot.flat[:] = inputs(alone.rank, 0)
    exchange.mean(slot, slice(None), 1.0).wait()
    assert slot.factors is not None
    if alone.rank == alone.size - 1:
        slot.factors["w"] = slot.factors["w"] * numpy.float32(1.5)
    text = error_on_all(alone, MismatchError, lambda: exchange.mean(slot, slice(None), 1.0).wait())
    assert "different factors" in text
    assert isinstance(make_exchange(alone.replaced(config=Config(compression="power_sgd:3"))), LowRankExchange)
    with pytest.raises(ConfigError, match="takes float32 gradients; the model has gradients of float64"):
        exchange.allocate(3, numpy.dtype(numpy.float64))
    with pytest.raises(ConfigError, match="the rank is '0'"):
        make_exchange(alone, compression="power_sgd:0")


def trained(there: World, strategy: Sync, steps: range, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train, and return all that a checkpoint has."""
    model = adapter(dtype="float32", seed=2)
    strategy.begin(there, model)
    if before:
        strategy.restore(before["strategy"])
        model.restore(before["model"])
        strategy.restore_own(before["own"])
    train(there, strategy, model, steps)
    state = host_copy({"model": model.state(), "strategy": strategy.state(), "own": strategy.own_state()})
    strategy.close()
    return state


@pytest.mark.parametrize("compression", ["power_sgd:1", "int4"])
def test_the_warm_up_is_not_compressed(alone: World, compression: str) -> None:
    """Its steps are those without compression, and the next ones begin it. A resume at any step has the same bits."""
    coded = alone.replaced(config=replace(alone.config, compression=compression))
    plain = trained(alone, Sync(), range(3))
    expected = trained(coded, Sync(), range(3, 6), plain)
    assert whole(trained(coded, Sync(warm_up=3), range(3))["model"]) == whole(plain["model"])
    for middle in (0, 2, 3, 4):
        half = trained(coded, Sync(warm_up=3), range(middle))
        assert half["strategy"].get("warm_up", 0) == max(0, 3 - middle)
        found = trained(coded, Sync(warm_up=3), range(middle, 6), half)
        assert whole(found) == whole(expected), middle
    assert whole(trained(coded, Sync(), range(3))["model"]) != whole(plain["model"])


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The values and bits of a state."""
    arrays, others = split(state)
    return {**{name: value.tobytes() for name, value in arrays.items()}, **others}


def test_warm_ups_that_are_refused(alone: World) -> None:
    for wrong in (-1, 0.5, True):
        with pytest.raises(ConfigError, match=f"Sync: warm_up={wrong}; it must be an int of at least 0"):
            Sync(warm_up=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="warm_up=3 together with virtual_ranks=4"):
        Sync(warm_up=3, virtual_ranks=4)
    auto = alone.replaced(config=replace(alone.config, compression="auto"))
    text = error_on_all(alone, ConfigError, lambda: Sync(warm_up=3).begin(auto, adapter(dtype="float32")))
    assert "Sync: warm_up=3 together with compression=auto" in text
    text = error_on_all(alone, MismatchError, lambda: Sync(warm_up=1 + alone.rank).begin(alone, adapter()))
    assert "Sync(warm_up=1)" in text
