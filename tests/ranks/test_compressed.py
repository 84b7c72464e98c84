"""Sums in a codec's form, with error feedback: how far off, what is kept, and the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from mpitrain import World
from mpitrain.compression import CODECS, make_codec
from mpitrain.config import Config
from mpitrain.errors import ConfigError, DataError, MismatchError, NonFiniteError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.exchange import CompressedExchange, PlainExchange, make_exchange
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.profile import DEFAULT

from .common import assert_same_bits, error_on_all, skip_alone
from .placements import PLACEMENTS, placed

LENGTHS = (0, 1, 2, 7, 255, 1000, 100_003)
FLOAT32 = numpy.dtype(numpy.float32)


@pytest.fixture(params=PLACEMENTS)
def there(request: pytest.FixtureRequest, world: World) -> World:
    return placed(world, request.param)


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs(rank: int, step: int, length: int) -> numpy.ndarray:
    """float32 values of several magnitudes that any rank can make for any other."""
    rng = numpy.random.default_rng((rank, step))
    return (rng.standard_normal(length) * 2.0 ** rng.integers(-3, 3, length)).astype(numpy.float32)


def relative_error(codec: str) -> float:
    """Of the largest value of a block at most, by one rounding."""
    return {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.51 / 127, "int4": 0.51 / 7}[codec]


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_as_close_as_the_codec_allows(there: World, codec: str, length: int) -> None:
    exchange = CompressedExchange(there, codec)
    flat = exchange.allocate(length, FLOAT32)
    flat[:] = inputs(there.rank, 0, length)
    exchange.mean(flat, 1.0).wait()
    assert_same_bits(there, flat)
    parts = [inputs(rank, 0, length).astype(numpy.float64) for rank in range(there.size)]
    exact = sum(parts, numpy.zeros(length))
    # Every contribution is rounded once and the sum once, each against the largest value there can be in its block.
    largest = sum((abs(part).max(initial=0) for part in parts), 0.0)
    assert (abs(flat - exact) <= 2.1 * relative_error(codec) * largest).all()


@pytest.mark.parametrize("length", [1, 1000, 70_001])
def test_what_is_left_out_comes_later(there: World, codec: str, length: int) -> None:
    """Over many steps nothing is lost: what came out and what is still kept add up to what went in."""
    exchange = CompressedExchange(there, codec)
    flat = exchange.allocate(length, FLOAT32)
    came_out, went_in = numpy.zeros(length), numpy.zeros(length)
    for step in range(5):
        flat[:] = inputs(there.rank, step, length)
        exchange.mean(flat, 1.0).wait()
        came_out += flat
        went_in += sum(inputs(rank, step, length).astype(numpy.float64) for rank in range(there.size))
    kept = there.sum(exchange.state()["residual 0"].astype(numpy.float64))
    # In float32: a few roundings a step.
    numpy.testing.assert_allclose(came_out + kept, went_in, rtol=0, atol=5 * 40 * there.size * 2.0**-22)
    if len(set(there.node_ranks)) > 1 and length > 1:
        assert kept.any()


def test_values_that_fit_are_exact(there: World, codec: str) -> None:
    exchange = CompressedExchange(there, codec)
    flat = exchange.allocate(10_000, FLOAT32)
    # Few bits for a cast; for whole numbers the largest code in every block, whose scale is then the number of terms.
    flat[:] = value = {"int8": 127.0, "int4": 7.0}.get(codec, 64.0)
    exchange.mean(flat, 1.0).wait()
    assert (flat == value * there.size).all()
    assert not exchange.state()["residual 0"].any()


def test_not_a_number_does_not_stay(there: World, codec: str) -> None:
    exchange = CompressedExchange(there, codec)
    flat = exchange.allocate(5000, FLOAT32)
    flat[:] = 1.0
    if there.rank == there.size - 1:
        flat[1234] = numpy.nan
    exchange.mean(flat, 1.0).wait()
    assert numpy.isnan(flat[1234])
    assert numpy.isfinite(flat[2000:]).all()
    flat[:] = 1.0
    exchange.mean(flat, 1.0).wait()
    assert numpy.isfinite(flat).all()


def test_a_rank_of_weight_0_hands_in_nothing(there: World, codec: str) -> None:
    exchange = CompressedExchange(there, codec)
    flat = exchange.allocate(300, FLOAT32)
    flat[:] = numpy.nan if there.rank else 127.0
    exchange.mean(flat, 0.0 if there.rank else 1.0).wait()
    assert (flat == 127.0).all()


def test_parts_of_a_buffer_keep_what_is_theirs(there: World, codec: str) -> None:
    """As buckets are parts of one buffer."""
    whole, parts = CompressedExchange(there, codec), CompressedExchange(there, codec)
    one, other = whole.allocate(512, FLOAT32), parts.allocate(512, FLOAT32)
    one[:] = other[:] = inputs(there.rank, 0, 512)
    handles = [parts.mean(other[256:], 1.0), parts.mean(other[:256], 1.0)]
    for handle in handles:
        handle.wait()
    whole.mean(one, 1.0).wait()
    mine = parts.state()["residual 0"]
    sums = there.sum([one.astype(numpy.float64), whole.state()["residual 0"].astype(numpy.float64)])
    others = there.sum([other.astype(numpy.float64), mine.astype(numpy.float64)])
    # Cut in another way, so rounded in another way, but what is missing in one is kept in the other.
    numpy.testing.assert_allclose(
        sums[0] / there.size + sums[1], others[0] / there.size + others[1], rtol=0, atol=1e-5 * there.size
    )


def test_goes_on_from_its_state(there: World, codec: str) -> None:
    def steps(exchange: CompressedExchange, flat: numpy.ndarray, numbers: range) -> bytes:
        for step in numbers:
            flat[:] = inputs(there.rank, step, flat.size)
            exchange.mean(flat, 1.0).wait()
        return flat.tobytes()

    first = CompressedExchange(there, codec)
    flat = first.allocate(3000, FLOAT32)
    steps(first, flat, range(3))
    state = first.state()
    expected = steps(first, flat, range(3, 5))
    second = CompressedExchange(there, codec)
    other = second.allocate(3000, FLOAT32)
    second.restore(state)
    assert steps(second, other, range(3, 5)) == expected
    with pytest.raises(DataError, match="residual 0"):
        second.restore({"residual 0": numpy.zeros(2, numpy.float32)})


def test_only_float32(there: World, codec: str) -> None:
    with pytest.raises(ConfigError, match="gradients of float64") as caught:
        CompressedExchange(there, codec).allocate(3, numpy.dtype(numpy.float64))
    assert caught.value.known_everywhere


def test_the_setting(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    there = placed(world, "alone on each node")
    assert isinstance(make_exchange(there), PlainExchange)
    for name in CODECS:
        assert isinstance(make_exchange(replace(there, config=Config(compression=name))), CompressedExchange)
    with pytest.raises(ConfigError, match="known: bf16, fp16, int4, int8"):
        make_exchange(there, compression="int9")
    with pytest.raises(ConfigError, match="leave out algorithm=ring"):
        make_exchange(there, "ring", "int8")
    capfd.readouterr()
    assert isinstance(make_exchange(there, compression="auto"), PlainExchange)
    fast = replace(DEFAULT, nodes=tuple(map(str, range(world.size))), codecs=(("bf16", 1e10),))
    chosen = make_exchange(replace(there, profile=fast), compression="auto")
    assert isinstance(chosen, CompressedExchange) == (world.size > 1)
    slow = replace(fast, bytes_per_second=1e10)
    assert isinstance(make_exchange(replace(there, profile=slow), compression="auto"), PlainExchange)
    if world.is_root and world.size > 1:
        said = capfd.readouterr().out
        assert "compression auto: none; the network is not known" in said
        assert f"compression auto: bf16; {world.size} nodes, 117 MB/s between them" in said


def test_another_one_on_another_rank(world: World) -> None:
    skip_alone(world)
    mine = "bf16" if world.rank == world.size - 1 else "none"
    text = error_on_all(world, MismatchError, lambda: make_exchange(world, compression=mine))
    assert f"{world.name(world.size - 1)}: compression bf16; {world.name(0)}: compression none" in text


def test_codecs_are_made_for_this_process() -> None:
    for name in CODECS:
        assert make_codec(name).name == name


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_a_mean_beyond_the_wire_is_an_error_on_every_rank(world: World, codec: str) -> None:
    """Of finite gradients: the step must not put infinity into the parameters. Afterwards the reducer goes on."""
    skip_alone(world)
    apart = placed(world, "alone on each node")
    large = {"fp16": 1e5, "bf16": 3.4e38}[codec]
    parameters = [Parameter(name, (2,), numpy.dtype(numpy.float32)) for name in "ab"]
    reducer = GradientReducer(apart, parameters, exchange=lambda own: make_exchange(own, compression=codec))
    for value in (1.0, large, 1.0):
        reducer.begin(1.0)
        reducer.ready(0, numpy.ones(2, numpy.float32))
        reducer.ready(1, numpy.full(2, value, numpy.float32))
        if value == large:
            text = error_on_all(world, NonFiniteError, reducer.finish)
            assert "the mean gradient of b is beyond what the compression can express" in text
        else:
            reducer.finish()
            assert (reducer.gradients[1] == 1).all()


def test_a_step_that_is_left_out_leaves_nothing_behind(world: World, codec: str) -> None:
    """What the codec left out of its gradients is not in the next step's means, which are those of a new reducer."""
    there = placed(world, "alone on each node")
    gradient = numpy.full(2048, 1e-3, numpy.float32)
    wrong = gradient.copy()
    if there.is_root:
        wrong[1024:] = inputs(there.rank, 0, 1024)
        wrong[0] = numpy.inf

    def means(*gradients: numpy.ndarray) -> list[numpy.ndarray]:
        reducer = GradientReducer(
            there, [Parameter("w", (2048,), FLOAT32)], exchange=lambda own: CompressedExchange(own, codec)
        )
        found = []
        for values in gradients:
            reducer.begin(1.0, 1024.0)
            reducer.ready(0, values * numpy.float32(1024))
            reducer.finish(0.0, may_skip=True)
            found.append(reducer.flats[FLOAT32].copy())
        return found

    assert means(wrong, gradient)[-1].tobytes() == means(gradient)[-1].tobytes()
