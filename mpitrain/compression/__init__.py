"""Codecs: fewer bytes on the wire for float32 values. No MPI here, and no state: an exchange holds the residuals.

To add a codec, write a file with a factory that takes `compiled`, and add a line below. The codec then inherits the
contract tests (tests/test_compression.py, tests/ranks/test_compressed.py), MPITRAIN_COMPRESSION, `mpitrain bench
--codecs` and the benchmark (benchmarks/codecs.py). If it has no kernels for GPUs (Codec.device_code), gradients on GPUs
are coded on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

from mpitrain.compression.cast import bfloat16, float16
from mpitrain.compression.codec import Codec
from mpitrain.compression.int4 import int4
from mpitrain.compression.int8 import int8
from mpitrain.compression.kernels import can_compile
from mpitrain.errors import ConfigError

CODECS: dict[str, Callable[[bool], Codec]] = {
    "bf16": bfloat16,
    "fp16": float16,
    "int8": int8,
    "int4": int4,
}


def make_codec(name: str) -> Codec:
    """Make the codec of that name, ready to run: compiled by Numba if it can be imported, otherwise in NumPy.

    Both give the same bits, so ranks with and without Numba can work together. `codec.compiled` says which one it is.
    The first codec of a name takes one to two CPU seconds, to load Numba and to compile. No rank waits for another.

    Raises:
        ConfigError: there is no codec of that name.
    """
    if name not in CODECS:
        raise ConfigError(f"there is no codec {name!r}; known: {', '.join(sorted(CODECS))}")
    codec = CODECS[name](can_compile())
    # Compile now: to compile in the middle of a training step would delay every rank.
    values, wire = numpy.zeros(1, numpy.float32), numpy.empty(codec.wire_bytes(1), numpy.uint8)
    codec.encode(values, wire, error=values)
    codec.decode(wire, values)
    codec.add(wire, values)
    return codec
