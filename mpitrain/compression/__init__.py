"""Codecs: compression of float32 values. They use no MPI and keep no state: an exchange holds the residuals.

To add a codec, write a file with a factory that takes `compiled`, such as top_k.py, or int4.py for whole numbers with
a scale for each block, and add a line below. The codec then inherits the contract tests (tests/test_compression.py,
tests/ranks/test_compressed.py), MPITRAIN_COMPRESSION, `mpitrain bench --codecs` and the benchmark
(benchmarks/codecs.py). If it has no kernels for GPUs (Codec.device_code), gradients on GPUs are coded on the CPU.

A factory hides its module: import the constants of a codec from `mpitrain.compression.NAME`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy

from mpitrain.compression import power_sgd
from mpitrain.compression.cast import bfloat16, float16
from mpitrain.compression.codec import Codec
from mpitrain.compression.int4 import int4
from mpitrain.compression.int8 import int8
from mpitrain.compression.kernels import can_compile
from mpitrain.compression.quantised_top_k import of_setting
from mpitrain.compression.top_k import top_k
from mpitrain.errors import ConfigError

_RATE_VALUES, _RATE_ROUNDS = 2**18, 3  # of coding_rate

CODECS: dict[str, Callable[[bool], Codec]] = {
    "bf16": bfloat16,
    "fp16": float16,
    "int8": int8,
    "int4": int4,
    "top_k": top_k,
}
# Codecs with a setting, as in top_k:0.05: the functions that make a factory from the text after the colon.
SETTABLE: dict[str, Callable[[str], Callable[[bool], Codec]]] = {"top_k": of_setting}


def factory_of(name: str) -> Callable[[bool], Codec]:
    """Return the factory of a codec by its name in CODECS, or by its name with a setting.

    Raises:
        ConfigError: there is no codec of that name, or its setting is not allowed.
    """
    codec, colon, setting = name.partition(":")
    if codec not in CODECS:
        raise ConfigError(f"there is no codec {codec!r}; known: {', '.join(sorted(CODECS))}")
    if not colon:
        return CODECS[codec]
    if codec not in SETTABLE:
        raise ConfigError(
            f"compression {name}: {codec} takes no setting; {', '.join(sorted(SETTABLE))} does. Use {codec}"
        )
    return SETTABLE[codec](setting)


def names() -> list[str]:
    """Return the names of all gradient compressions: the codecs, and power_sgd, which is not a codec; see
    power_sgd.py."""
    return sorted([*CODECS, power_sgd.NAME])


def check_compression(name: str, others: Sequence[str] = ()) -> None:
    """Raise ConfigError unless `name` is one of these, with an allowed setting, or one of `others`."""
    kind = name.partition(":")[0]
    if kind == power_sgd.NAME:
        power_sgd.rank_of(name)  # raises
    elif kind in CODECS:
        factory_of(name)  # raises
    elif name not in others:
        raise ConfigError(f"there is no compression {name!r}; known: {', '.join([*names(), *others])}")


def make_codec(name: str) -> Codec:
    """Make the codec of that name, ready to run: compiled by Numba if it can be imported, otherwise in NumPy.

    Both give the same bits, so ranks with and without Numba can work together. `codec.compiled` tells which one it is.
    The first codec of a name takes one to two CPU seconds, to load Numba and to compile. No rank waits for another.

    Raises:
        ConfigError: see `factory_of`.
    """
    codec = factory_of(name)(can_compile())
    # Compile now: to compile in the middle of a training step would delay every rank.
    values, wire = numpy.zeros(1, numpy.float32), numpy.empty(codec.wire_bytes(1), numpy.uint8)
    codec.encode(values, wire, error=values)
    codec.decode(wire, values)
    codec.add(wire, values)
    return codec


def coding_rate(name: str) -> float:
    """Measure the bytes of float32 that this core encodes, adds and decodes per second, in turn."""
    codec = make_codec(name)
    values = numpy.linspace(-1, 1, _RATE_VALUES, dtype=numpy.float32)
    wire, total = numpy.empty(codec.wire_bytes(values.size), numpy.uint8), numpy.zeros_like(values)
    taken = []
    for _ in range(_RATE_ROUNDS):
        began = time.perf_counter()
        codec.encode(values, wire)
        codec.add(wire, total)
        codec.decode(wire, total)
        taken.append(time.perf_counter() - began)
    return values.nbytes / min(taken)
