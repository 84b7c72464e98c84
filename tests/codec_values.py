"""Values for the tests of codecs, and what a codec makes of them."""

from __future__ import annotations

import numpy
import pytest

from mpitrain.compression import CODECS
from mpitrain.compression.codec import Codec
from mpitrain.compression.kernels import INT4_SMALLEST_ABSMAX, SMALLEST_ABSMAX, can_compile

# All codecs, and those that are made by a setting alone.
FORMS = [*CODECS, "top_k:0.02:2"]
QUANTISED = ["0.02:1", "0.02:2", "0.3:3", "0.5:4", "0.00025:2"]  # settings of top_k with few bits
SIZES = [0, 1, 2, 63, 64, 65, 255, 256, 257, 65536, 65537, 200003]
MANY = 2**21
LARGEST = numpy.finfo(numpy.float32).max
NEEDS_NUMBA = pytest.mark.skipif(not can_compile(), reason="Numba is not installed")
COMPILED = [pytest.param(True, id="numba", marks=NEEDS_NUMBA), pytest.param(False, id="numpy")]


def random(count: int) -> numpy.ndarray:
    """Values of many magnitudes, which change from block to block and inside some blocks."""
    generator = numpy.random.default_rng(count)
    magnitude = 2.0 ** generator.integers(-30, 30, count // 100 + 1).repeat(100)[:count]
    return (generator.standard_normal(count) * magnitude).astype(numpy.float32)


def from_bits(bits: list[int] | numpy.ndarray) -> numpy.ndarray:
    return numpy.asarray(bits, numpy.uint32).view(numpy.float32)


def any_bits(seed: int) -> numpy.ndarray:
    """Every kind of float32: most are finite, and some are subnormal numbers, infinities and NaNs of all kinds."""
    return from_bits(numpy.random.default_rng(seed).integers(0, 2**32, MANY, dtype=numpy.uint32))


def special() -> numpy.ndarray:
    """Zeros, ends of ranges, and values halfway between two of a shorter format, with neighbours and both signs."""
    generator = numpy.random.default_rng(1)
    upper = generator.integers(0, 2**15, 4096, dtype=numpy.uint32) << 16
    halves = [upper | low for low in (0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001)]
    ends = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000]
    ends += [0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x387FF000, 0x33800000, 0x33000000, 0x33000001]
    positive = numpy.concatenate([numpy.array(ends, numpy.uint32), *halves])
    return from_bits(numpy.concatenate([positive, positive | numpy.uint32(0x80000000)]))


def in_blocks(magnitudes: list[float]) -> numpy.ndarray:
    """Blocks of 256 random values. `magnitudes` has the largest |value| of each block."""
    values = numpy.random.default_rng(2).uniform(-1, 1, (len(magnitudes), 256))
    values[:, 100] = 1
    return (values * numpy.array(magnitudes)[:, None]).astype(numpy.float32).ravel()


BOUNDARIES = [1e-38, 1e-45]
for _smallest in (SMALLEST_ABSMAX, INT4_SMALLEST_ABSMAX):
    BOUNDARIES += [float(_smallest), float(numpy.nextafter(_smallest, numpy.float32(0)))]
BOUNDARIES += [float(LARGEST), float(numpy.nextafter(LARGEST, numpy.float32(0))), 3e38, 1.0, 127.0, 0.0]


def encode(codec: Codec, values: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The wire and the error."""
    wire = numpy.empty(codec.wire_bytes(values.size), numpy.uint8)
    error = numpy.empty_like(values)
    codec.encode(values, wire, error)
    return wire, error


def decode(codec: Codec, wire: numpy.ndarray, count: int) -> numpy.ndarray:
    values = numpy.empty(count, numpy.float32)
    codec.decode(wire, values)
    return values


def in_float64(values: numpy.ndarray) -> numpy.ndarray:
    with numpy.errstate(invalid="ignore"):  # some NaNs are signalling ones
        return values.astype(numpy.float64)


def same_bits(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


INPUTS = {
    **{f"{count} values": random(count) for count in SIZES},
    "any bits": any_bits(0),
    "special": special(),
    "boundaries": in_blocks(BOUNDARIES),
}
