"""The codecs: the bits of those on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from mpitrain.compression import CODECS
from mpitrain.cuda import kernels

from .common import SIZES, Lying, any_bits, assert_same, numbers


def codec_inputs(size: int) -> Iterator[numpy.ndarray]:
    yield any_bits("float32", size, 10)
    generator = numpy.random.default_rng(size)
    magnitude = 2.0 ** generator.integers(-149, 128, size // 32 + 1).repeat(32)[:size]
    yield (generator.standard_normal(size) * magnitude).astype(numpy.float32)


@pytest.mark.parametrize("name", [name for name, make in CODECS.items() if make(False).device_code])
def test_codecs(cupy: Any, name: str) -> None:
    codec = CODECS[name](False)
    for size in SIZES:
        for values in codec_inputs(size):
            wire, error, decoded = numpy.empty(codec.wire_bytes(size), numpy.uint8), values.copy(), values.copy()
            codec.encode(values, wire, error)
            codec.decode(wire, decoded)
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
