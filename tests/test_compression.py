"""Every codec of the registry, by Numba and by NumPy: what it makes of each value, and that both give the same bits.

What is expected comes from float64 arithmetic, in which every float32, its rounding and its error are exact.
"""

from __future__ import annotations

import sys
import threading
import tracemalloc

import numpy
import pytest

from mpitrain.compression import CODECS, make_codec
from mpitrain.compression.codec import Codec
from mpitrain.compression.kernels import (
    INT4_LARGEST_SCALE,
    INT4_SMALLEST_ABSMAX,
    LARGEST_SCALE,
    SMALLEST_ABSMAX,
    can_compile,
)
from mpitrain.errors import ConfigError

SIZES = [0, 1, 2, 63, 64, 65, 255, 256, 257, 65536, 65537, 200003]
MANY = 2**21
LARGEST = numpy.finfo(numpy.float32).max
NEEDS_NUMBA = pytest.mark.skipif(not can_compile(), reason="Numba is not installed")
# Bits a significand has, exponent of the smallest normal number, first value that rounds to infinity.
CASTS = {"bf16": (8, -126, (2 - 2.0**-8) * 2.0**127), "fp16": (11, -14, 65520.0)}


@pytest.fixture(params=[pytest.param(True, id="numba", marks=NEEDS_NUMBA), pytest.param(False, id="numpy")])
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest, compiled: bool) -> Codec:
    return CODECS[request.param](compiled)


def random(count: int) -> numpy.ndarray:
    """Values of many magnitudes, which change from block to block and inside some blocks."""
    generator = numpy.random.default_rng(count)
    magnitude = 2.0 ** generator.integers(-30, 30, count // 100 + 1).repeat(100)[:count]
    return (generator.standard_normal(count) * magnitude).astype(numpy.float32)


def from_bits(bits: list[int] | numpy.ndarray) -> numpy.ndarray:
    return numpy.asarray(bits, numpy.uint32).view(numpy.float32)


def any_bits(seed: int) -> numpy.ndarray:
    """Every kind of float32: most of them finite, subnormal ones, infinities, NaNs of all kinds."""
    return from_bits(numpy.random.default_rng(seed).integers(0, 2**32, MANY, dtype=numpy.uint32))


def special() -> numpy.ndarray:
    """Zeros, ends of ranges, and values halfway between two of a shorter format with their neighbours, signed."""
    generator = numpy.random.default_rng(1)
    upper = generator.integers(0, 2**15, 4096, dtype=numpy.uint32) << 16
    halves = [upper | low for low in (0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001)]
    ends = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000]
    ends += [0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x387FF000, 0x33800000, 0x33000000, 0x33000001]
    positive = numpy.concatenate([numpy.array(ends, numpy.uint32), *halves])
    return from_bits(numpy.concatenate([positive, positive | numpy.uint32(0x80000000)]))


def in_blocks(magnitudes: list[float]) -> numpy.ndarray:
    """Blocks of 256 random values, the largest |value| of each being given."""
    values = numpy.random.default_rng(2).uniform(-1, 1, (len(magnitudes), 256))
    values[:, 100] = 1
    return (values * numpy.array(magnitudes)[:, None]).astype(numpy.float32).ravel()


BOUNDARIES = [float(SMALLEST_ABSMAX), float(numpy.nextafter(SMALLEST_ABSMAX, numpy.float32(0))), 1e-38, 1e-45]
BOUNDARIES += [float(LARGEST), float(numpy.nextafter(LARGEST, numpy.float32(0))), 3e38, 1.0, 127.0, 0.0]


def encode(codec: Codec, values: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Wire and error."""
    wire = numpy.empty(codec.wire_bytes(values.size), numpy.uint8)
    error = numpy.empty_like(values)
    codec.encode(values, wire, error)
    return wire, error


def decode(codec: Codec, wire: numpy.ndarray, count: int) -> numpy.ndarray:
    values = numpy.empty(count, numpy.float32)
    codec.decode(wire, values)
    return values


def in_float64(values: numpy.ndarray) -> numpy.ndarray:
    with numpy.errstate(invalid="ignore"):  # NaNs that signal
        return values.astype(numpy.float64)


def same_bits(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


INPUTS = {
    **{f"{count} values": random(count) for count in SIZES},
    "any bits": any_bits(0),
    "special": special(),
    "boundaries": in_blocks(BOUNDARIES),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_error_is_what_is_missing(codec: Codec, name: str) -> None:
    values = INPUTS[name]
    wire, error = encode(codec, values)
    decoded = decode(codec, wire, values.size)
    with numpy.errstate(all="ignore"):
        expected = numpy.where(numpy.isfinite(decoded), values - decoded, numpy.float32(0))
    assert same_bits(error, expected)
    assert numpy.isfinite(error).all()
    assert not numpy.isfinite(decoded[~numpy.isfinite(values)]).any()


@pytest.mark.parametrize("name", INPUTS)
def test_the_error_may_overwrite_the_values_or_be_left_out(codec: Codec, name: str) -> None:
    values = INPUTS[name].copy()
    wire, error = encode(codec, values)
    alone = numpy.empty_like(wire)
    codec.encode(values, alone)
    assert same_bits(alone, wire)
    assert same_bits(values, INPUTS[name])
    codec.encode(values, alone, error=values)
    assert same_bits(alone, wire)
    assert same_bits(values, error)


@pytest.mark.parametrize("name", INPUTS)
def test_add_is_one_addition_of_what_is_decoded(codec: Codec, name: str) -> None:
    wire, _ = encode(codec, INPUTS[name])
    total = random(INPUTS[name].size)
    with numpy.errstate(all="ignore"):
        expected = total + decode(codec, wire, total.size)
    codec.add(wire, total)
    assert same_bits(total, expected)


@pytest.mark.parametrize("name", INPUTS)
def test_encoding_what_was_decoded_changes_nothing(codec: Codec, name: str) -> None:
    wire, _ = encode(codec, INPUTS[name])
    again, error = encode(codec, decode(codec, wire, INPUTS[name].size))
    assert same_bits(again, wire)
    assert not error.any()


@pytest.mark.parametrize("count", [1, 63, 1000, 200003])
def test_the_error_is_as_large_as_is_said(codec: Codec, count: int) -> None:
    """The values are all of one magnitude. No claim is far above the error found."""
    values = numpy.random.default_rng(count).uniform(-1, 1, count).astype(numpy.float32)
    _, error = encode(codec, values)
    bound = codec.relative_error * numpy.abs(values).max()
    assert numpy.abs(error).max() <= bound
    if count >= 1000:
        assert numpy.abs(error).max() >= bound / 4


def test_it_is_said_whether_what_is_finite_becomes_infinite(codec: Codec) -> None:
    wire, _ = encode(codec, numpy.array([LARGEST], numpy.float32))
    assert codec.may_overflow == (not numpy.isfinite(decode(codec, wire, 1)).all())


def test_the_wire_is_shorter_than_the_values(codec: Codec) -> None:
    sizes = [codec.wire_bytes(count) for count in range(2000)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert sizes[-1] < 0.75 * 4 * 1999


@NEEDS_NUMBA
@pytest.mark.parametrize("codec_name", CODECS)
@pytest.mark.parametrize("name", [*INPUTS, "1", "2", "3"])
def test_numba_and_numpy_give_the_same_bits(codec_name: str, name: str) -> None:
    values = INPUTS[name] if name in INPUTS else any_bits(int(name))
    fast, twin = CODECS[codec_name](True), CODECS[codec_name](False)
    wire, error = encode(fast, values)
    twin_wire, twin_error = encode(twin, values)
    assert same_bits(wire, twin_wire)
    assert same_bits(error, twin_error)
    assert same_bits(decode(fast, wire, values.size), decode(twin, wire, values.size))
    total, twin_total = random(values.size), random(values.size)
    fast.add(wire, total)
    twin.add(wire, twin_total)
    assert same_bits(total, twin_total)


@pytest.mark.parametrize("name", CASTS)
def test_casts_round_to_nearest_and_ties_to_even(name: str, compiled: bool) -> None:
    digits, lowest_exponent, overflow = CASTS[name]
    codec = CODECS[name](compiled)
    assert codec.compiled == compiled
    assert codec.relative_error == 2.0**-digits
    for values in (any_bits(0), special(), random(200003)):
        exact = in_float64(values)
        finite = numpy.abs(exact) < overflow
        exponent = numpy.frexp(numpy.where(finite, exact, 1.0))[1] - 1  # of the highest bit
        unit = 2.0 ** (numpy.maximum(exponent, lowest_exponent) - digits + 1)
        with numpy.errstate(invalid="ignore"):
            expected = numpy.where(finite, numpy.rint(exact / unit) * unit, numpy.copysign(numpy.inf, exact))
        expected[numpy.isnan(exact)] = numpy.nan
        wire, error = encode(codec, values)
        decoded = decode(codec, wire, values.size)
        assert same_bits(decoded, expected.astype(numpy.float32))
        # Nothing is lost between the two.
        assert (in_float64(decoded) + error == exact)[finite].all()
        assert (numpy.abs(error) <= unit / 2)[finite].all()


# Largest code, values to a block, smallest |value| that is not sent as 0, largest scale, rounding beside half a step.
BLOCKWISE = {
    "int8": (127, 256, SMALLEST_ABSMAX, LARGEST_SCALE, 2.0**-14),
    "int4": (7, 64, INT4_SMALLEST_ABSMAX, INT4_LARGEST_SCALE, 2.0**-18),
}


def codes_of(name: str, wire: numpy.ndarray, count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Scales and codes, by shifts of Python's integers."""
    blocks = -(-count // BLOCKWISE[name][1])
    scales, packed = wire[: 4 * blocks].view(numpy.float32), wire[4 * blocks :]
    if name == "int8":
        return scales, packed.view(numpy.int8)
    codes = numpy.stack([packed & 15, packed >> 4], axis=1).ravel().astype(numpy.int8)
    assert not codes[count:].any()
    return scales, numpy.where(codes > 7, codes - 16, codes)[:count]


@pytest.mark.parametrize("codec_name", BLOCKWISE)
@pytest.mark.parametrize("name", INPUTS)
def test_blocks_err_by_half_a_step_at_most(codec_name: str, name: str, compiled: bool) -> None:
    steps, length, smallest, largest_scale, spare = BLOCKWISE[codec_name]
    values = INPUTS[name]
    codec = CODECS[codec_name](compiled)
    assert codec.compiled == compiled
    assert codec.relative_error == (0.5 + spare) / steps
    wire, _ = encode(codec, values)
    scales, codes = codes_of(codec_name, wire, values.size)
    assert codes.size == values.size
    assert codes.min(initial=0) >= -steps
    exact, decoded = in_float64(values), in_float64(decode(codec, wire, values.size))
    padding = numpy.zeros(scales.size * length - values.size)
    rows, decoded_rows = (numpy.append(one, padding).reshape(-1, length) for one in (exact, decoded))
    code_rows = numpy.abs(numpy.append(codes, padding).reshape(-1, length))
    largest = numpy.abs(rows).max(axis=1)
    with numpy.errstate(invalid="ignore"):
        finite, zero = numpy.isfinite(largest), largest < smallest
        sent = finite & ~zero
        assert numpy.isnan(scales[~finite]).all()
        assert not code_rows[~sent].any()
        assert numpy.isnan(decoded[: values.size][numpy.repeat(~finite, length)[: values.size]]).all()
        assert not scales[zero].any()
        wide = scales.astype(numpy.float64)
        assert (numpy.abs(steps * wide - largest) <= 2.0**-23 * largest)[sent].all()
        assert (scales <= largest_scale)[sent].all()
        assert (code_rows.max(axis=1, initial=0) == steps)[sent].all()
        assert (numpy.abs(rows - decoded_rows).max(axis=1, initial=0) <= wide * (0.5 + spare))[sent].all()


def test_int8_of_a_block_of_one_number(compiled: bool) -> None:
    codec = CODECS["int8"](compiled)
    numbers = numpy.concatenate([random(4001), numpy.array([1, -1, 0, 1 / 3, 127, 0.1, LARGEST], numpy.float32)])
    wire, _ = encode(codec, numbers.repeat(256))
    decoded = decode(codec, wire, numbers.size * 256).reshape(-1, 256)
    assert (decoded == decoded[:, :1]).all()
    assert numpy.abs(decoded[:, 0].view(numpy.int32) - numbers.view(numpy.int32)).max() <= 1  # the next one at most
    assert (decoded[:, 0] == numbers).mean() > 0.98
    assert (decoded[-7:-1, 0] == numbers[-7:-1]).all()


def test_int8_by_hand(compiled: bool) -> None:
    """The example of int8.py."""
    codec = CODECS["int8"](compiled)
    values = numpy.array([50, -127, 0.4, 1.5, 2.5], numpy.float32)
    wire, error = encode(codec, values)
    assert wire.tolist() == [0, 0, 0x80, 0x3F, 50, 129, 0, 2, 2]
    assert error.tolist() == [0, 0, numpy.float32(0.4), -0.5, 0.5]


def test_int4_of_a_block_of_one_number(compiled: bool) -> None:
    codec = CODECS["int4"](compiled)
    numbers = numpy.concatenate([random(4001), numpy.array([1, -1, 0, 1 / 3, 7, 0.1, LARGEST], numpy.float32)])
    wire, _ = encode(codec, numbers.repeat(64))
    decoded = decode(codec, wire, numbers.size * 64).reshape(-1, 64)
    assert (decoded == decoded[:, :1]).all()
    assert numpy.abs(decoded[:, 0].view(numpy.int32) - numbers.view(numpy.int32)).max() <= 1  # the next one at most
    assert (decoded[-7:, 0] == numbers[-7:]).all()


def test_int4_by_hand(compiled: bool) -> None:
    """The example of int4.py."""
    codec = CODECS["int4"](compiled)
    values = numpy.array([3, -7, 0.4, 1.5, 2.5], numpy.float32)
    wire, error = encode(codec, values)
    assert wire.tolist() == [0, 0, 0x80, 0x3F, 0x93, 0x20, 0x02]
    assert error.tolist() == [0, 0, numpy.float32(0.4), -0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "sizes"),
    {
        "bf16": (0, 2, 514, 400006),
        "fp16": (0, 2, 514, 400006),
        "int8": (0, 5, 265, 203131),
        "int4": (0, 5, 149, 112506),
    }.items(),
)
def test_bytes_on_the_wire(name: str, sizes: tuple[int, ...]) -> None:
    codec = CODECS[name](False)
    assert tuple(codec.wire_bytes(count) for count in (0, 1, 257, 200003)) == sizes


def test_residuals_make_up_for_the_errors(codec: Codec) -> None:
    """With the error of each step added to the next one, the sum of what was sent stays within one step's error."""
    values = random(1000) / numpy.float32(2.0**28)
    residual, sent = numpy.zeros_like(values), numpy.zeros(values.size)
    for _ in range(100):
        residual += values
        wire, residual = encode(codec, residual)
        sent += decode(codec, wire, values.size)
    missing = 100 * values.astype(numpy.float64) - sent
    assert numpy.abs(missing - residual).max() <= 1e-4 * numpy.abs(values).max()


def test_memory_that_is_not_aligned_or_read_only(codec: Codec) -> None:
    values = random(1000) / numpy.float32(2.0**28)
    values.flags.writeable = False
    wire, error = encode(codec, values)
    odd = numpy.empty(wire.size + 1, numpy.uint8)[1:]
    codec.encode(values, odd)
    assert same_bits(odd, wire)
    odd.flags.writeable = False
    total = decode(codec, odd, values.size)
    assert same_bits(total, decode(codec, wire, values.size))
    codec.add(odd, total)
    assert (numpy.abs(total - 2 * values) <= 2.001 * numpy.abs(error)).all()


def test_no_memory_is_taken_for_a_piece(codec: Codec) -> None:
    values = random(65536)
    wire, error = encode(codec, values)
    tracemalloc.start()
    try:
        codec.encode(values, wire, error)
        codec.decode(wire, values)
        codec.add(wire, values)
        assert tracemalloc.get_traced_memory()[1] < values.nbytes / 2
    finally:
        tracemalloc.stop()


def test_arrays_that_do_not_fit(codec: Codec) -> None:
    values = numpy.zeros(10, numpy.float32)
    wire = numpy.zeros(codec.wire_bytes(10), numpy.uint8)
    wrong_values = [values.astype(float), values.reshape(2, 5), numpy.zeros(20, numpy.float32)[::2]]
    for wrong in wrong_values:
        for call in (
            codec.encode,
            lambda one, other: codec.decode(other, one),
            lambda one, other: codec.add(other, one),
        ):
            with pytest.raises(ValueError, match=f"{codec.name}: values are .* must be float32, one-dimensional"):
                call(wrong, wire)
    for wrong in (wire[1:], wire.view(numpy.int8), wire.repeat(2)[::2]):
        with pytest.raises(ValueError, match=rf"the wire of 10 values is .* must be uint8 \({wire.size},\)"):
            codec.encode(values, wrong)
        with pytest.raises(ValueError, match="the wire of 10 values"):
            codec.add(wrong, values)
    with pytest.raises(ValueError, match=r"error is float32 \(9,\); it must be float32 \(10,\)"):
        codec.encode(values, wire, values[1:])


@NEEDS_NUMBA
@pytest.mark.parametrize("name", CODECS)
def test_others_run_meanwhile(name: str) -> None:
    """The compiled loops let go of Python's lock: another thread runs before they are through."""
    codec = make_codec(name)
    values = numpy.zeros(2**24, numpy.float32)
    wire = numpy.zeros(codec.wire_bytes(values.size), numpy.uint8)
    calls = {
        "encode": lambda: codec.encode(values, wire, values),
        "decode": lambda: codec.decode(wire, values),
        "add": lambda: codec.add(wire, values),
    }
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # from now on a thread runs until it lets go of the lock by itself
    try:
        for what, call in calls.items():
            assert any(runs_beside(call) for _ in range(20)), what
        assert not runs_beside(lambda: sum(range(100000)))
    finally:
        sys.setswitchinterval(interval)


def runs_beside(call: object) -> bool:
    """True if this thread runs while another one is in `call`. On a busy machine this thread may come too late."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        call()  # type: ignore[operator]
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    early = not ended.is_set()
    thread.join()
    return early


@pytest.mark.parametrize("name", CODECS)
def test_by_name(name: str) -> None:
    codec = make_codec(name)
    assert codec.name == name
    assert codec.compiled == (can_compile() and CODECS[name](True).compiled)  # some are NumPy's alone


@pytest.mark.parametrize("name", CODECS)
def test_without_numba(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    codec = make_codec(name)
    assert not codec.compiled
    wire, _ = encode(codec, numpy.ones(3, numpy.float32))
    assert decode(codec, wire, 3).tolist() == [1, 1, 1]


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=f"there is no codec 'int2'; known: {', '.join(sorted(CODECS))}"):
        make_codec("int2")
