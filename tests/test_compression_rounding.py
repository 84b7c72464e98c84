"""How each codec rounds, by Numba and by NumPy: a cast to the nearest number, a block to half a step.

float64 arithmetic gives the expected values. In it, every float32, its rounding and its error are exact.
"""

from __future__ import annotations

import numpy
import pytest

from codec_values import COMPILED, INPUTS, LARGEST, any_bits, decode, encode, in_float64, random, same_bits, special
from mpitrain.compression import CODECS
from mpitrain.compression.kernels import INT4_LARGEST_SCALE, INT4_SMALLEST_ABSMAX, LARGEST_SCALE, SMALLEST_ABSMAX

# Bits of a significand, exponent of the smallest normal number, first value that rounds to infinity.
CASTS = {"bf16": (8, -126, (2 - 2.0**-8) * 2.0**127), "fp16": (11, -14, 65520.0)}


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


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
        # What is decoded and the error make up the value, with no loss.
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
    assert numpy.abs(decoded[:, 0].view(numpy.int32) - numbers.view(numpy.int32)).max() <= 1  # at most the next number
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
    assert numpy.abs(decoded[:, 0].view(numpy.int32) - numbers.view(numpy.int32)).max() <= 1  # at most the next number
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
