"""What each codec makes of values, by Numba and by NumPy: by hand, and against Python's sort, fractions and float64.

In float64 arithmetic every float32, its rounding and its error are exact.
"""

from __future__ import annotations

import math

import numpy
import pytest

from codec_values import (
    COMPILED,
    INPUTS,
    LARGEST,
    QUANTISED,
    any_bits,
    decode,
    encode,
    in_float64,
    random,
    same_bits,
    special,
)
from mpitrain.compression import CODECS, SETTABLE, factory_of, make_codec
from mpitrain.compression.kernels import INT4_LARGEST_SCALE, LARGEST_SCALE
from mpitrain.errors import ConfigError, GradientError
from mpitrain.server.gradients import read_gradients

DENSITIES = ["0.00025", "0.01", "0.1", "0.5"]


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def kept(density: float, count: int) -> int:
    return max(1, math.floor(density * count + 0.5))


# The examples of the codecs' files: values, the wire, what is missing.
BY_HAND = {
    "int8": ([50, -127, 0.4, 1.5, 2.5], "0000803f 32810002 02", [0, 0, numpy.float32(0.4), -0.5, 0.5]),
    "int4": ([3, -7, 0.4, 1.5, 2.5], "0000803f 932002", [0, 0, numpy.float32(0.4), -0.5, 0.5]),
    "top_k:0.5": (
        [3, -5, 0.5, 4, -3, 3],
        "00004040 0000a0c0 00008040 0000 0100 0300",  # 3, -5, 4; places 0, 1, 3
        [0, 0, 0.5, 0, -3, 3],
    ),
    "top_k:0.5:2": (
        [3, -5, 0.5, 4, 0, 1, 0, -8],
        "00008040 00000041 c4be04",  # levels 4, 8
        [-1, -1, 0.5, 0, 0, 1, 0, 0],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str, compiled: bool) -> None:
    given, sent, missing = BY_HAND[name]
    codec = factory_of(name)(compiled)
    assert codec.compiled == compiled
    values = numpy.array(given, numpy.float32)
    wire, error = encode(codec, values)
    assert wire.tobytes() == bytes.fromhex(sent)
    assert error.tolist() == missing
    assert decode(codec, wire, values.size).tolist() == (values - error).tolist()


@pytest.mark.parametrize(
    ("name", "sizes"),
    {
        "bf16": {0: 0, 1: 2, 257: 514, 200003: 400006},
        "fp16": {0: 0, 1: 2, 257: 514, 200003: 400006},
        "int8": {0: 0, 1: 5, 257: 265, 200003: 203131},
        "int4": {0: 0, 1: 5, 257: 149, 200003: 112506},
        # One value at least.
        "top_k:0.01": {0: 0, 1: 6, 49: 6, 50: 6, 149: 6, 150: 12, 4096: 246, 4097: 252, 8192: 492},
        # 82 x (2 + 5 + 1) + 4095 >> 5 = 783 bits, and two levels. A block of one value keeps it: its code, no lower
        # bit, one upper bit.
        "top_k:0.02:2": {0: 0, 4096: 98 + 8, 40960: 980 + 80, 4097: 98 + 8 + 9},
        # 64 x (2 + 6 + 1) + 4095 >> 6 = 639
        "top_k:0.015625:2": {0: 0, 4096: 80 + 8, 40960: 800 + 80, 4097: 80 + 8 + 9},
        # 82 x 7 + 127 = 701
        "top_k:0.02:1": {0: 0, 4096: 88 + 4, 40960: 880 + 40, 4097: 88 + 4 + 5},
        # 2048 x (4 + 1 + 1) + 2047 = 14335, and eight levels
        "top_k:0.5:4": {0: 0, 4096: 1792 + 32, 40960: 17920 + 320, 4097: 1792 + 32 + 33},
        # 1 x (2 + 12 + 1) + 0
        "top_k:0.00025:2": {0: 0, 4096: 2 + 8, 40960: 20 + 80, 4097: 2 + 8 + 9},
    }.items(),
)
def test_bytes_on_the_wire(name: str, sizes: dict[int, int]) -> None:
    codec = factory_of(name)(False)
    assert {count: codec.wire_bytes(count) for count in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(
            (f"top_k:{text}", f"top_k:{text}: the density is '{text}'; allowed is .* from 0.00024")
            for text in ("", "x", "nan", "0", "-1", "0.0001", "0.51", "1", "inf")
        ),
        *(
            (f"top_k:0.02:{bits}", f"compression top_k:0.02:{bits}: the bits of a value are '{bits}'; allowed")
            for bits in ("", "0", "5", "8", "two", "2.0", "2:2", "-1", " 2")
        ),
        ("top_k:2:2", "the density is '2'"),
        *((f"{name}:2", f"compression {name}:2: {name} takes no setting") for name in set(CODECS) - set(SETTABLE)),
    ],
)
def test_a_setting_that_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_codec(name)


# -- casts ------------------------------------------------------------------------------------------------------------

# Bits of a significand, exponent of the smallest normal number, first value that rounds to infinity.
CASTS = {"bf16": (8, -126, (2 - 2.0**-8) * 2.0**127), "fp16": (11, -14, 65520.0)}


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


# -- blocks -----------------------------------------------------------------------------------------------------------

# Largest code, values to a block, largest scale, rounding beside half a step, and at least what part of all numbers a
# block of one number keeps exactly.
BLOCKWISE = {
    "int8": (127, 256, LARGEST_SCALE, 2.0**-14, 0.98),
    "int4": (7, 64, INT4_LARGEST_SCALE, 2.0**-18, 0.9),
}


def codes_of(name: str, wire: numpy.ndarray, count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Scales and codes. The codes are one string of bits, lowest first, which ends with zeros."""
    steps, length, *_ = BLOCKWISE[name]
    blocks, width = -(-count // length), steps.bit_length() + 1
    bits = numpy.unpackbits(wire[4 * blocks :], bitorder="little")
    assert not bits[count * width :].any()
    codes = bits[: count * width].reshape(count, width) @ (1 << numpy.arange(width)).astype(numpy.int16)
    return wire[: 4 * blocks].view(numpy.float32), numpy.where(codes > steps, codes - 2 * (steps + 1), codes)


@pytest.mark.parametrize("codec_name", BLOCKWISE)
@pytest.mark.parametrize("name", INPUTS)
def test_blocks_err_by_half_a_step_at_most(codec_name: str, name: str, compiled: bool) -> None:
    steps, length, largest_scale, spare, _ = BLOCKWISE[codec_name]
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
        finite, zero = numpy.isfinite(largest), largest < steps * 2.0**-126  # a scale that is no normal number
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


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_block_of_one_number(name: str, compiled: bool) -> None:
    steps, length, largest_scale, _, exact = BLOCKWISE[name]
    codec = CODECS[name](compiled)
    numbers = numpy.concatenate([random(4001), numpy.array([1, -1, 0, 1 / 3, steps, 0.1, LARGEST], numpy.float32)])
    wire, _ = encode(codec, numbers.repeat(length))
    decoded = decode(codec, wire, numbers.size * length).reshape(-1, length)
    assert (decoded == decoded[:, :1]).all()
    assert numpy.abs(decoded[:, 0].view(numpy.int32) - numbers.view(numpy.int32)).max() <= 1  # at most the next number
    assert (decoded[:, 0] == numbers).mean() > exact
    assert (decoded[-7:-1, 0] == numbers[-7:-1]).all()
    assert decoded[-1, 0] == numpy.float32(steps) * largest_scale  # int4's is LARGEST


# -- the largest of a block --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", INPUTS)
def test_top_k_keeps_the_largest_of_each_block(name: str, density: str, compiled: bool) -> None:
    values = INPUTS[name][:70_001]
    codec = factory_of(f"top_k:{density}")(compiled)
    wire, error = encode(codec, values)
    decoded = decode(codec, wire, values.size)
    sent = 0
    for start in range(0, values.size, 4096):
        block, found = values[start : start + 4096], decoded[start : start + 4096]
        count = kept(float(density), block.size)
        sent += count
        if not numpy.isfinite(block).all():
            assert numpy.isnan(found).all()
            assert not error[start : start + 4096].any()
            continue
        # By Python's sort, which is stable: of equal ones the first.
        order = sorted(range(block.size), key=lambda place: -abs(float(block[place])))[:count]
        expected = numpy.zeros_like(block)
        expected[order] = block[order]
        assert same_bits(found, expected)
        rest = block.copy()
        rest[order] = 0
        assert (error[start : start + 4096] == rest).all()
    assert wire.size == 6 * sent


def split(sizes: list[float], times: int) -> list[list[float]]:
    """The parts of |values|, each split at its mean so many times."""
    if not times:
        return [sizes]
    mean = math.fsum(sizes) / max(len(sizes), 1)
    lower, upper = ([size for size in sizes if (size > mean) is above] for above in (False, True))
    return split(lower, times - 1) + split(upper, times - 1)


def expected(values: numpy.ndarray, density: float, bits: int) -> numpy.ndarray:
    """What arrives."""
    decoded = numpy.zeros(values.size)
    for start in range(0, values.size, 4096):
        block = in_float64(values[start : start + 4096])
        places = sorted(range(block.size), key=lambda place, block=block: (-abs(block[place]), place))
        places = places[: kept(density, block.size)]
        levels: dict[float, float] = {}
        for part in split([abs(float(block[place])) for place in places], bits - 1):
            levels |= dict.fromkeys(part, float(numpy.float32(math.fsum(part) / max(len(part), 1))))
        for place in places:
            decoded[start + place] = math.copysign(levels[abs(float(block[place]))], block[place])
    return decoded


@pytest.mark.parametrize("setting", QUANTISED)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 63, 4096, 4097, 9001, 70_000])
def test_what_arrives(setting: str, count: int, compiled: bool) -> None:
    """A level may be rounded to the next float32, if the sums that lead to it are rounded to another side."""
    density, bits = setting.split(":")
    codec = factory_of(f"top_k:{setting}")(compiled)
    values = numpy.random.default_rng(count).standard_normal(count).astype(numpy.float32)
    wire, error = encode(codec, values)
    found, wanted = decode(codec, wire, count), expected(values, float(density), int(bits))
    assert (numpy.abs(found - wanted) <= 2.0**-23 * numpy.abs(wanted)).all()
    sent = wanted != 0
    assert (found[sent] == wanted[sent]).mean() >= 0.99 if count else True
    assert (values - found == error).all()


@pytest.mark.parametrize("setting", QUANTISED)
@pytest.mark.parametrize("name", INPUTS)
def test_the_errors_are_not_larger_than_the_values(setting: str, name: str, compiled: bool) -> None:
    """The sum of their squares, block by block: otherwise error feedback would not converge."""
    values = INPUTS[name]
    _, error = encode(factory_of(f"top_k:{setting}")(compiled), values)
    for start in range(0, values.size, 4096):
        block, its_error = in_float64(values[start : start + 4096]), in_float64(error[start : start + 4096])
        if not numpy.isfinite(block).all():
            assert not its_error.any()
            continue
        largest = max(numpy.abs(block).max(), 1e-45)
        assert ((its_error / largest) ** 2).sum() <= ((block / largest) ** 2).sum() * (1 + 1e-6)


def test_one_large_value_does_not_lift_the_others(compiled: bool) -> None:
    """With one bit all get their mean. With equally wide steps, all but one would get 125 with two bits."""
    values = numpy.array([1, 2, 3, 1000, 0, 0, 0, 0], numpy.float32)
    for bits, arrived in ((1, [251.5] * 4), (2, [2, 2, 2, 1000]), (3, [1.5, 1.5, 3, 1000])):
        codec = factory_of(f"top_k:0.5:{bits}")(compiled)
        wire, _ = encode(codec, values)
        assert decode(codec, wire, 8).tolist() == [*arrived, 0, 0, 0, 0]


@pytest.mark.parametrize("count", [4096, 4096 + 4, 4])
def test_wires_that_nobody_has_made(count: int, compiled: bool) -> None:
    """Any single bit of the last block changed: what is called valid can be decoded."""
    codec = factory_of("top_k:0.02:2")(compiled)
    values = random(count)
    wire, _ = encode(codec, values)
    num_bytes = codec.wire_bytes(count % 4096 or 4096) - 8
    refused = 0
    for bit in range(8 * num_bytes):
        changed = wire.copy()
        changed[wire.size - num_bytes + bit // 8] ^= 1 << bit % 8
        if codec.is_valid(changed, values):
            assert numpy.isfinite(decode(codec, changed, count)).all()
        else:
            refused += 1
    # Each upper bit that is changed adds or takes a place, and so does a bit behind them. Lower bits and codes do not.
    assert refused == (8 * num_bytes - 82 * (2 + 5) if count == 4096 else 8 - (2 + 2))
    assert codec.is_valid(wire, values)


def test_a_place_behind_a_short_block(compiled: bool) -> None:
    """Of five values the last one is kept: its lower bits 0, its upper bit 1. Compiled code would write behind them."""
    codec = factory_of("top_k:0.02:2")(compiled)
    values = numpy.array([0, 0, 0, 0, 9], numpy.float32)
    wire, _ = encode(codec, values)
    assert wire[8:].tolist() == [0b10_00_00]  # from the right: code, lower bits, upper bits
    wire[8] |= 0b1000
    assert not codec.is_valid(wire, values)
    with pytest.raises(GradientError, match=r"gradients of top_k:0\.02:2 came for places that do not exist"):
        read_gradients([wire], {numpy.dtype(numpy.float32): slice(10, 15)}, codec)


def test_levels_of_any_bits(compiled: bool) -> None:
    """A block with NaN or infinity has levels of NaN and no codes."""
    values = any_bits(3)[:8192].copy()
    values[:4096] = 1
    values[17] = -numpy.inf
    codec = factory_of("top_k:0.02:2")(compiled)
    wire, error = encode(codec, values)
    levels = wire[:16].view(numpy.float32)
    assert numpy.isnan(levels).all()
    assert not wire[16 : 16 + 20].any()
    assert not error.any()
