"""What top_k keeps and what sign makes of a block, by Numba and by NumPy, against Python's sort and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest

from codec_values import COMPILED, INPUTS, decode, encode, same_bits
from mpitrain.compression import CODECS, SETTABLE, factory_of, make_codec
from mpitrain.errors import ConfigError

DENSITIES = ["0.00025", "0.01", "0.1", "0.5"]


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def kept(density: float, count: int) -> int:
    return max(1, math.floor(density * count + 0.5))


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


def test_top_k_by_hand(compiled: bool) -> None:
    """The example of top_k.py, in one block."""
    codec = factory_of("top_k:0.5")(compiled)
    values = numpy.array([3, -5, 0.5, 4, -3, 3], numpy.float32)
    wire, error = encode(codec, values)
    assert wire[:12].view(numpy.float32).tolist() == [3, -5, 4]
    assert wire[12:].view(numpy.uint16).tolist() == [0, 1, 3]
    assert error.tolist() == [0, 0, 0.5, 0, -3, 3]


def test_top_k_keeps_one_at_least(compiled: bool) -> None:
    codec = factory_of("top_k:0.01")(compiled)
    assert [codec.wire_bytes(count) // 6 for count in (0, 1, 49, 50, 149, 150, 4096, 4097, 8192)] == [
        0, 1, 1, 1, 1, 2, 41, 42, 82
    ]  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_sign_has_the_mean_of_a_block(name: str, compiled: bool) -> None:
    values = INPUTS[name][:70_001]
    codec = CODECS["sign"](compiled)
    wire, _ = encode(codec, values)
    decoded = decode(codec, wire, values.size)
    assert wire.size == 4 * -(-values.size // 256) + -(-values.size // 8)
    for start in range(0, values.size, 256):
        block, found = values[start : start + 256], decoded[start : start + 256]
        if not numpy.isfinite(block).all():
            assert numpy.isnan(found).all()
            continue
        assert (numpy.signbit(found) == numpy.signbit(block)).all()
        # Exact, where the codec adds in float64: off by half a unit of a float32 at most, and a little of float64.
        mean = sum((Fraction(abs(float(value))) for value in block), Fraction(0)) / block.size
        scale = numpy.abs(found)
        assert (scale == scale[0]).all()
        unit = Fraction(float(numpy.spacing(scale[0])))
        assert abs(Fraction(float(scale[0])) - mean) <= unit / 2 * (1 + Fraction(1, 2**20))


def test_sign_by_hand(compiled: bool) -> None:
    """The example of sign.py."""
    codec = CODECS["sign"](compiled)
    wire, error = encode(codec, numpy.array([4, -1, 0.5, -2.5], numpy.float32))
    assert wire.tolist() == [0, 0, 0, 0x40, 0b1010]  # 2.0
    assert error.tolist() == [2, 1, -1.5, -0.5]
    assert decode(codec, wire, 4).tolist() == [2, -2, 2, -2]


@pytest.mark.parametrize("text", ["", "x", "nan", "0", "-1", "0.0001", "0.51", "1", "inf"])
def test_a_density_that_is_not_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=f"top_k:{text}: the density is '{text}'; allowed is .* from 0.00024"):
        make_codec(f"top_k:{text}")


def test_a_setting_where_there_is_none() -> None:
    for name in set(CODECS) - set(SETTABLE):
        with pytest.raises(ConfigError, match=f"compression {name}:2: {name} takes no setting"):
            make_codec(f"{name}:2")
    assert make_codec("top_k:0.05").name == "top_k:0.05"
