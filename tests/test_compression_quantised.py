"""top_k with few bits for a value: by hand, against Python's sort and sums, and wires that nobody has made."""

from __future__ import annotations

import math

import numpy
import pytest

from codec_values import COMPILED, INPUTS, QUANTISED, any_bits, decode, encode, in_float64, random
from mpitrain.compression import factory_of, make_codec
from mpitrain.errors import ConfigError, GradientError
from mpitrain.server.gradients import read_gradients


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_by_hand(compiled: bool) -> None:
    """The example of quantised_top_k.py."""
    codec = factory_of("top_k:0.5:2")(compiled)
    assert codec.compiled == compiled
    values = numpy.array([3, -5, 0.5, 4, 0, 1, 0, -8], numpy.float32)
    wire, error = encode(codec, values)
    assert wire[:8].view(numpy.float32).tolist() == [4, 8]
    assert wire[8:].tobytes().hex() == "c4be04"
    assert decode(codec, wire, 8).tolist() == [4, -4, 0, 4, 0, 0, 0, -8]
    assert error.tolist() == [-1, -1, 0.5, 0, 0, 1, 0, 0]


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
        kept = max(1, math.floor(density * block.size + 0.5))
        places = sorted(range(block.size), key=lambda place, block=block: (-abs(block[place]), place))[:kept]
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
    kept = wanted != 0
    assert (found[kept] == wanted[kept]).mean() >= 0.99 if count else True
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


@pytest.mark.parametrize(
    ("setting", "block"),
    {
        # 82 x (2 + 5 + 1) + 4095 >> 5 = 783 bits, and two levels
        "0.02:2": 98 + 8,
        # 64 x (2 + 6 + 1) + 4095 >> 6 = 639
        "0.015625:2": 80 + 8,
        # 82 x 7 + 127 = 701
        "0.02:1": 88 + 4,
        # 2048 x (4 + 1 + 1) + 2047 = 14335, and eight levels
        "0.5:4": 1792 + 32,
        # 1 x (2 + 12 + 1) + 0
        "0.00025:2": 2 + 8,
    }.items(),
)
def test_bytes_on_the_wire(setting: str, block: int) -> None:
    codec = factory_of(f"top_k:{setting}")(False)
    assert codec.wire_bytes(0) == 0
    assert codec.wire_bytes(4096) == block
    assert codec.wire_bytes(10 * 4096) == 10 * block
    # a block of one value keeps it: its code, no lower bit, one upper bit
    bits = int(setting[-1])
    assert codec.wire_bytes(4096 + 1) == block + 4 * 2 ** (bits - 1) + 1


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


@pytest.mark.parametrize("bits", ["", "0", "5", "8", "two", "2.0", "2:2", "-1", " 2"])
def test_bits_that_are_refused(bits: str) -> None:
    with pytest.raises(ConfigError, match=f"compression top_k:0.02:{bits}: the bits of a value are '{bits}'; allowed"):
        make_codec(f"top_k:0.02:{bits}")
    with pytest.raises(ConfigError, match="the density is '2'"):
        make_codec("top_k:2:2")


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
