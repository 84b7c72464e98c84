"""The codecs: the bits of those on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from mpitrain.compression import CODECS
from mpitrain.cuda import kernels
from tests.codec_values import decode, encode, special

from .common import SIZES, Lying, any_bits, assert_same, numbers

by_name = pytest.mark.parametrize("name", [name for name, make in CODECS.items() if make(False).device_code])


def codec_inputs(size: int) -> Iterator[numpy.ndarray]:
    yield any_bits("float32", size, 10)
    generator = numpy.random.default_rng(size)
    magnitude = 2.0 ** generator.integers(-149, 128, size // 32 + 1).repeat(32)[:size]
    yield (generator.standard_normal(size) * magnitude).astype(numpy.float32)


@by_name
def test_codecs(cupy: Any, name: str) -> None:
    codec = CODECS[name](False)
    for size in SIZES:
        for values in codec_inputs(size):
            wire, error = encode(codec, values)
            decoded = decode(codec, wire, size)
            assert kernels.wire_bytes(name, size) == wire.size
            # The wire's offset is in bytes.
            for offset, wire_offset in ((0, 0), (1, 4), (3, 8), (0, 12)):
                source, sent = Lying(cupy, values, offset), Lying(cupy, numpy.zeros_like(wire), wire_offset)
                missing = Lying(cupy, numpy.zeros_like(values), offset)
                kernels.encode(name, source.array, sent.array)
                assert sent.get().tobytes() == wire.tobytes()
                sent.array.fill(0)
                kernels.encode(name, source.array, sent.array, missing.array)
                assert sent.get().tobytes() == wire.tobytes()
                assert missing.get().tobytes() == error.tobytes()
                assert source.get().tobytes() == values.tobytes()
                kernels.encode(name, source.array, sent.array, source.array)
                assert sent.get().tobytes() == wire.tobytes()
                assert source.get().tobytes() == error.tobytes()
                kernels.decode(name, sent.array, source.array)
                assert source.get().tobytes() == decoded.tobytes()
                total = numbers("float32", size, 11)
                into = Lying(cupy, total, offset)
                kernels.add_decoded(name, sent.array, into.array)
                assert_same(into.get(), total + decoded)
                assert sent.get().tobytes() == wire.tobytes()


@by_name
def test_codecs_of_every_kind_of_number(cupy: Any, name: str) -> None:
    """Ends of ranges, subnormal numbers, ties between two of a shorter format, infinities, and NaN of all kinds."""
    codec = CODECS[name](False)
    for values in (special(), any_bits("float32", 300_000, 1)):
        wire, error = encode(codec, values)
        source, missing = cupy.asarray(values), cupy.zeros(values.size, numpy.float32)
        sent = cupy.zeros(wire.size, numpy.uint8)
        kernels.encode(name, source, sent, missing)
        assert sent.get().tobytes() == wire.tobytes()
        assert missing.get().tobytes() == error.tobytes()
        kernels.decode(name, sent, source)
        assert source.get().tobytes() == decode(codec, wire, values.size).tobytes()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_words_of_16_bits(cupy: Any, name: str) -> None:
    wire = numpy.arange(2**16, dtype=numpy.uint16).view(numpy.uint8)
    out = cupy.zeros(2**16, numpy.float32)
    kernels.decode(name, cupy.asarray(wire), out)
    assert out.get().tobytes() == decode(CODECS[name](False), wire, 2**16).tobytes()
