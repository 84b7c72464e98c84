"""Sums in a codec's form, with error feedback: how far off, what is kept, and the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from mpitrain import World
from mpitrain.compression import CODECS, names
from mpitrain.config import Config
from mpitrain.errors import ConfigError, DataError, MismatchError, NonFiniteError
from mpitrain.profile import DEFAULT
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import CompressedExchange, PlainExchange, make_exchange
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.reducer.slot import Slot

from .common import assert_same_bits, error_on_all, skip_alone
from .placements import PLACEMENTS, placed

LENGTHS = (0, 1, 2, 7, 1000, 30_003)
FLOAT32 = numpy.dtype(numpy.float32)
WHOLE = slice(None)


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


def decoded(codec: str, *values: float) -> list[float]:
    """What comes out at the other end, of each by itself."""
    coder, found = CODECS[codec](False), []
    for value in values:
        one, wire = numpy.array([value], numpy.float32), numpy.empty(coder.wire_bytes(1), numpy.uint8)
        coder.encode(one, wire)
        coder.decode(wire, one)
        found.append(float(one[0]))
    return found


def exact_value(codec: str, terms: int) -> float:
    """The largest whole number up to 127 of which sums of up to so many terms cross the wire without loss."""
    sums = {value: [float(value * number) for number in range(1, terms + 1)] for value in range(127, 0, -1)}
    return next(float(value) for value in sums if decoded(codec, *sums[value]) == sums[value])


def that_fits(codec: str, value: float, length: int) -> numpy.ndarray:
    """An array that crosses the wire without loss: of that value everywhere, or once if the codec keeps only a part."""
    coder, values = CODECS[codec](False), numpy.full(length, value, numpy.float32)
    error = numpy.empty_like(values)
    coder.encode(values, numpy.empty(coder.wire_bytes(length), numpy.uint8), error)
    if error.any():
        values[:] = 0
        values[length // 3] = value
    return values


def first_overflow(codec: str) -> float:
    """The lowest float32 that becomes infinite on the wire: found by halving, over the bits."""
    low, high = 0, int(numpy.finfo(numpy.float32).max.view(numpy.uint32))
    while high - low > 1:
        middle = (low + high) // 2
        is_finite = numpy.isfinite(decoded(codec, float(numpy.uint32(middle).view(numpy.float32)))[0])
        low, high = (middle, high) if is_finite else (low, middle)
    return float(numpy.uint32(high).view(numpy.float32))


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_as_close_as_the_codec_allows(there: World, codec: str, length: int) -> None:
    exchange = CompressedExchange(there, codec)
    slot = exchange.allocate(length, FLOAT32)
    flat = slot.flat
    flat[:] = inputs(there.rank, 0, length)
    exchange.mean(slot, WHOLE, 1.0).wait()
    assert_same_bits(there, flat)
    parts = [inputs(rank, 0, length).astype(numpy.float64) for rank in range(there.size)]
    exact = sum(parts, numpy.zeros(length))
    # Every contribution is rounded once and the sum once, each against the largest value there can be in its block.
    largest = sum((abs(part).max(initial=0) for part in parts), 0.0)
    assert (abs(flat - exact) <= 2.1 * CODECS[codec](False).relative_error * largest).all()


@pytest.mark.parametrize("length", [1, 1000, 70_001])
def test_what_is_left_out_comes_later(there: World, codec: str, length: int) -> None:
    """Over many steps nothing is lost: what came out and what is still kept add up to what went in."""
    exchange = CompressedExchange(there, codec)
    slot = exchange.allocate(length, FLOAT32)
    flat = slot.flat
    came_out, went_in = numpy.zeros(length), numpy.zeros(length)
    for step in range(5):
        flat[:] = inputs(there.rank, step, length)
        exchange.mean(slot, WHOLE, 1.0).wait()
        came_out += flat
        went_in += sum(inputs(rank, step, length).astype(numpy.float64) for rank in range(there.size))
    kept = there.sum(slot.left_out().astype(numpy.float64))
    # In float32: a few roundings a step.
    numpy.testing.assert_allclose(came_out + kept, went_in, rtol=0, atol=5 * 40 * there.size * 2.0**-22)
    if len(set(there.node_ranks)) > 1 and length > 1:
        assert kept.any()


def test_values_that_fit_are_exact(there: World, codec: str) -> None:
    """A rank of weight 0 hands in nothing, and NaN does not stay. Gradients of float64 are refused."""
    exchange = CompressedExchange(there, codec)
    slot = exchange.allocate(10_000, FLOAT32)
    flat = slot.flat
    flat[:] = values = that_fits(codec, exact_value(codec, there.size), flat.size)
    exchange.mean(slot, WHOLE, 1.0).wait()
    assert values.any()
    assert (flat == values * there.size).all()
    assert not slot.left_out().any()
    flat[:] = numpy.nan if there.rank else that_fits(codec, exact_value(codec, 1), flat.size)
    expected = there.broadcast(flat.copy())
    exchange.mean(slot, WHOLE, 0.0 if there.rank else 1.0).wait()
    assert (flat == expected).all()
    flat[:] = 1.0
    if there.rank == there.size - 1:
        flat[1234] = numpy.nan
    exchange.mean(slot, WHOLE, 1.0).wait()
    assert numpy.isnan(flat[1234])
    assert numpy.isfinite(flat[1234 + 4096 :]).all()  # the longest block
    flat[:] = 1.0
    exchange.mean(slot, WHOLE, 1.0).wait()
    assert numpy.isfinite(flat).all()
    with pytest.raises(ConfigError, match="gradients of float64") as caught:
        exchange.allocate(3, numpy.dtype(numpy.float64))
    assert caught.value.known_everywhere


def test_parts_of_a_buffer_keep_what_is_theirs(there: World, codec: str) -> None:
    """Buckets too are parts of one buffer."""
    whole, parts = CompressedExchange(there, codec), CompressedExchange(there, codec)
    one, other = whole.allocate(512, FLOAT32), parts.allocate(512, FLOAT32)
    one.flat[:] = other.flat[:] = inputs(there.rank, 0, 512)
    handles = [parts.mean(other, slice(256, 512), 1.0), parts.mean(other, slice(0, 256), 1.0)]
    for handle in handles:
        handle.wait()
    whole.mean(one, WHOLE, 1.0).wait()
    sums = there.sum([one.flat.astype(numpy.float64), one.left_out().astype(numpy.float64)])
    others = there.sum([other.flat.astype(numpy.float64), other.left_out().astype(numpy.float64)])
    # Cut in another way, so rounded in another way, but what is missing in one is kept in the other.
    numpy.testing.assert_allclose(
        sums[0] / there.size + sums[1], others[0] / there.size + others[1], rtol=0, atol=1e-5 * there.size
    )


def test_goes_on_from_what_was_left_out(there: World, codec: str) -> None:
    def steps(exchange: CompressedExchange, slot: Slot, numbers: range) -> bytes:
        for step in numbers:
            slot.flat[:] = inputs(there.rank, step, slot.flat.size)
            exchange.mean(slot, WHOLE, 1.0).wait()
        return bytes(slot.flat.tobytes())

    first = CompressedExchange(there, codec)
    slot = first.allocate(3000, FLOAT32)
    steps(first, slot, range(3))
    left_out = slot.left_out()
    assert left_out is not None
    expected = steps(first, slot, range(3, 5))
    second = CompressedExchange(there, codec)
    other = second.allocate(3000, FLOAT32)
    other.restore(left_out)
    assert steps(second, other, range(3, 5)) == expected
    for wrong in (numpy.zeros(2, numpy.float32), numpy.zeros(3000, numpy.float64)):
        with pytest.raises(DataError, match=r"the residual of the slot is float32 \(3000,\)"):
            other.restore(wrong)
    second.reset()
    other.flat[:] = first_sum = inputs(there.rank, 3, 3000)
    second.mean(other, WHOLE, 1.0).wait()
    third = CompressedExchange(there, codec)
    new = third.allocate(3000, FLOAT32)
    new.flat[:] = first_sum
    third.mean(new, WHOLE, 1.0).wait()
    assert other.flat.tobytes() == new.flat.tobytes()


def test_only_its_own_slots(there: World, codec: str) -> None:
    """The residual of any other buffer would be lost: over four steps the result would be 0.0 instead of 2.0."""
    exchanges = [CompressedExchange(there, codec), CompressedExchange(there, codec), PlainExchange(there)]
    slot, foreign, plain = (one.allocate(4, FLOAT32) for one in exchanges)
    values = numpy.array([127, 0.25, 127, 0.25], numpy.float32)
    allowed = r"allowed are the slots"
    for exchange in (exchanges[0], exchanges[2]):
        for wrong, text in ((values, "an object of type ndarray"), (foreign, "a slot of another exchange")):
            with pytest.raises(ValueError, match=f"{there.name()}: mean.. was given {text}; {allowed}"):
                exchange.mean(wrong, WHOLE, 1.0)  # type: ignore[arg-type]
    assert plain.left_out() is None
    came_out = numpy.zeros(4)
    for _ in range(4):
        slot.flat[:] = values
        exchanges[0].mean(slot, WHOLE, 1.0).wait()
        came_out += slot.flat
    kept = there.sum(slot.left_out().astype(numpy.float64))
    assert (came_out + kept == 4 * there.size * values).all()  # sums of quarters: exact
    if codec == "int8" and there.size == 2:
        assert came_out.tolist() == [1016, 2, 1016, 2]


def test_the_setting(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    there = placed(world, "alone on each node")
    assert isinstance(make_exchange(there), PlainExchange)
    for name in CODECS:
        assert isinstance(make_exchange(there.replaced(config=Config(compression=name))), CompressedExchange)
    with pytest.raises(ConfigError, match=f"known: {', '.join(names())}, auto, none"):
        make_exchange(there, compression="int9")
    if world.size > 1:
        mine = "bf16" if world.rank == world.size - 1 else "none"
        text = error_on_all(world, MismatchError, lambda: make_exchange(world, compression=mine))
        assert f"{world.name(world.size - 1)}: compression bf16; {world.name(0)}: compression none" in text
    with pytest.raises(ConfigError, match="leave out algorithm=ring"):
        make_exchange(there, "ring", "int8")
    capfd.readouterr()
    assert isinstance(make_exchange(there, compression="auto"), PlainExchange)
    fast = replace(DEFAULT, nodes=tuple(map(str, range(world.size))), codecs=(("bf16", 1e10),))
    chosen = make_exchange(there.replaced(profile=fast), compression="auto")
    assert isinstance(chosen, CompressedExchange) == (world.size > 1)
    slow = replace(fast, bytes_per_second=1e10)
    assert isinstance(make_exchange(there.replaced(profile=slow), compression="auto"), PlainExchange)
    if world.is_root and world.size > 1:
        said = capfd.readouterr().out
        assert "compression auto: none; the network is not known" in said
        assert f"compression auto: bf16; {world.size} nodes, 117 MB/s between them" in said


@pytest.mark.parametrize("codec", [name for name in sorted(CODECS) if CODECS[name](False).may_overflow])
def test_a_mean_beyond_the_wire_is_an_error_on_every_rank(world: World, codec: str) -> None:
    """The gradients are finite: the step must not put infinity into the parameters. Then the reducer continues."""
    skip_alone(world)
    apart = placed(world, "alone on each node")
    large = min(1.5 * first_overflow(codec), 3.4e38)  # what each rank hands in, its share, is finite on the wire
    parameters = [Parameter(name, (2,), numpy.dtype(numpy.float32)) for name in "ab"]
    reducer = GradientReducer(apart, parameters, exchange=lambda own: make_exchange(own, compression=codec))
    for value in (1.0, large, 1.0):
        reducer.begin(1.0)
        reducer.ready(0, numpy.ones(2, numpy.float32))
        reducer.ready(1, numpy.full(2, value, numpy.float32))
        if value == large:
            text = error_on_all(world, NonFiniteError, reducer.finish)
            assert "the mean gradient of b is too large for the compression" in text
        else:
            reducer.finish()
            assert (reducer.gradients[1] == 1).all()


def test_a_step_that_is_left_out_leaves_nothing_behind(world: World, codec: str) -> None:
    """The next step's means have nothing of the skipped step's residual: they are those of a new reducer."""
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
