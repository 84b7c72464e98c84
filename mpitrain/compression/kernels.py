"""The codecs' loops for Numba, with the same bits as the NumPy twins in cast.py and blocks.py. Only this module imports
Numba.

These loops read each value once and process it while it is in a register. NumPy goes through memory for each operation.
LLVM can turn these loops into vector instructions because of the following:

- Blocks as slices, so that every index is a plain 0 to n.
- Errors go to a small scratch array first. If `error` is the memory of `values`, a loop that reads one and writes the
  other would run value by value. A loop over one of them and the scratch does not.
- Integers give the largest |value| of a block: the bits of floats without their sign are ordered as the floats are,
  with infinity and NaN above all others, and the largest integer may be found in any order.
- No `fastmath`: it would allow LLVM to fuse multiplication and addition, and to assume that there is no NaN.

NumPy's types are spelled out at every step, because Numba would otherwise turn 32-bit numbers into 64-bit ones.

Nothing is cached on disk (`cache=True`): Numba reads, changes and writes the index of that cache without a lock. So two
nodes with different CPUs that share a folder may store two programs under one name, and one of the nodes crashes with
an illegal instruction (see also Numba's issue 10128). Compilation takes about one CPU second per codec.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
from numpy import float32, int8, int32, uint8, uint32

from mpitrain.compression.codec import Passes

BLOCK_VALUES = 256
# int8: below the first the scale would not be a normal number; above the second 127 x scale would not be finite.
SMALLEST_ABSMAX = float32(127 * 2.0**-126)
LARGEST_SCALE = numpy.nextafter(numpy.finfo(float32).max / float32(127), float32(0))
INT4_BLOCK_VALUES = 64
INT4_SMALLEST_ABSMAX = float32(7 * 2.0**-126)
INT4_LARGEST_SCALE = numpy.finfo(float32).max / float32(7)
_INFINITY = uint32(0x7F800000)
_NAN = float32(numpy.nan)


def can_compile() -> bool:
    """True if Numba is installed, and NUMBA_DISABLE_JIT does not switch it off."""
    try:
        import numba
    except ImportError:
        return False
    config: Any = numba.config  # its attributes exist only at run time
    return not config.DISABLE_JIT


@cache
def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let Numba compile `kernel` at its first call. The kernel releases Python's lock while it runs."""
    import numba

    result: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(kernel)
    return result


def compiled_passes(
    encode: Callable[..., None], decode: Callable[..., None], add: Callable[..., None], *scratch: numpy.ndarray
) -> Passes:
    """Return the passes of three loops, compiled; `scratch` are the last arguments of `encode`."""
    encode, decode, add = compiled(encode), compiled(decode), compiled(add)
    return Passes(
        lambda values, wire, error: encode(values, *wire, error, *scratch),
        lambda wire, values: decode(*wire, values),
        lambda wire, total: add(*wire, total),
    )


def encode_int8(
    values: numpy.ndarray, scales: numpy.ndarray, codes: numpy.ndarray, error: numpy.ndarray, scratch: numpy.ndarray
) -> None:
    """See int8.py."""
    all_bits = values.view(uint32)
    for block in range(scales.size):
        start = block * BLOCK_VALUES
        stop = min(start + BLOCK_VALUES, values.size)
        part, bits, code = values[start:stop], all_bits[start:stop], codes[start:stop]
        largest = uint32(0)
        for i in range(bits.size):
            largest = max(largest, uint32(bits[i] & uint32(0x7FFFFFFF)))
        absmax = uint32(largest).view(float32)
        scale = inverse = float32(0)
        if largest < _INFINITY and absmax >= SMALLEST_ABSMAX:
            scale = min(float32(absmax / float32(127)), LARGEST_SCALE)
            inverse = float32(float32(127) / absmax)
        if largest < _INFINITY:
            scales[block] = scale
            for i in range(part.size):
                code[i] = int8(numpy.rint(part[i] * inverse))
                scratch[i] = part[i] - float32(code[i]) * scale
        else:
            scales[block] = _NAN
            for i in range(part.size):
                code[i] = 0
                scratch[i] = 0
        out = error[start:stop]
        for i in range(out.size):
            out[i] = scratch[i]


def decode_int8(scales: numpy.ndarray, codes: numpy.ndarray, values: numpy.ndarray) -> None:
    """See int8.py."""
    for block in range(scales.size):
        start = block * BLOCK_VALUES
        part, code, scale = values[start : start + BLOCK_VALUES], codes[start : start + BLOCK_VALUES], scales[block]
        for i in range(part.size):
            part[i] = float32(code[i]) * scale


def add_int8(scales: numpy.ndarray, codes: numpy.ndarray, total: numpy.ndarray) -> None:
    """See int8.py."""
    for block in range(scales.size):
        start = block * BLOCK_VALUES
        part, code, scale = total[start : start + BLOCK_VALUES], codes[start : start + BLOCK_VALUES], scales[block]
        for i in range(part.size):
            part[i] += float32(code[i]) * scale


def encode_int4(
    values: numpy.ndarray,
    scales: numpy.ndarray,
    codes: numpy.ndarray,
    error: numpy.ndarray,
    scratch: numpy.ndarray,
    nibbles: numpy.ndarray,
) -> None:
    """See int4.py. `nibbles` holds the codes of a block before two codes become a byte."""
    all_bits = values.view(uint32)
    for block in range(scales.size):
        start = block * INT4_BLOCK_VALUES
        stop = min(start + INT4_BLOCK_VALUES, values.size)
        part, bits, code = values[start:stop], all_bits[start:stop], codes[start // 2 : (stop + 1) // 2]
        largest = uint32(0)
        for i in range(bits.size):
            largest = max(largest, uint32(bits[i] & uint32(0x7FFFFFFF)))
        absmax = uint32(largest).view(float32)
        scale = inverse = float32(0)
        if largest < _INFINITY and absmax >= INT4_SMALLEST_ABSMAX:
            scale = float32(absmax / float32(7))
            inverse = float32(float32(7) / absmax)
        nibbles[part.size & ~1 :] = 0  # the upper half of the last byte, if the number is odd
        if largest < _INFINITY:
            scales[block] = scale
            for i in range(part.size):
                nibbles[i] = int8(numpy.rint(part[i] * inverse))
                scratch[i] = part[i] - float32(nibbles[i]) * scale
        else:
            scales[block] = _NAN
            for i in range(part.size):
                nibbles[i] = 0
                scratch[i] = 0
        for i in range(code.size):
            code[i] = uint8((int32(nibbles[2 * i]) & int32(15)) | (int32(nibbles[2 * i + 1]) & int32(15)) << int32(4))
        out = error[start:stop]
        for i in range(out.size):
            out[i] = scratch[i]


def decode_int4(scales: numpy.ndarray, codes: numpy.ndarray, values: numpy.ndarray) -> None:
    """See int4.py. Four bits to a number: with the sign bit flipped, they are the number plus 8."""
    for block in range(scales.size):
        start = block * INT4_BLOCK_VALUES
        part, scale = values[start : start + INT4_BLOCK_VALUES], scales[block]
        code = codes[start // 2 : start // 2 + (part.size + 1) // 2]
        for i in range(part.size // 2):
            byte = int32(code[i])
            part[2 * i] = float32(int32((byte & int32(15)) ^ int32(8)) - int32(8)) * scale
            part[2 * i + 1] = float32(int32((byte >> int32(4)) ^ int32(8)) - int32(8)) * scale
        if part.size % 2:
            part[part.size - 1] = float32(int32((int32(code[code.size - 1]) & int32(15)) ^ int32(8)) - int32(8)) * scale


def add_int4(scales: numpy.ndarray, codes: numpy.ndarray, total: numpy.ndarray) -> None:
    """Add what decode_int4 would return."""
    for block in range(scales.size):
        start = block * INT4_BLOCK_VALUES
        part, scale = total[start : start + INT4_BLOCK_VALUES], scales[block]
        code = codes[start // 2 : start // 2 + (part.size + 1) // 2]
        for i in range(part.size // 2):
            byte = int32(code[i])
            part[2 * i] += float32(int32((byte & int32(15)) ^ int32(8)) - int32(8)) * scale
            part[2 * i + 1] += float32(int32((byte >> int32(4)) ^ int32(8)) - int32(8)) * scale
        if part.size % 2:
            last = float32(int32((int32(code[code.size - 1]) & int32(15)) ^ int32(8)) - int32(8))
            part[part.size - 1] += last * scale


def encode_bf16(values: numpy.ndarray, words: numpy.ndarray, error: numpy.ndarray, scratch: numpy.ndarray) -> None:
    """First add half of the range that is cut off, or one less if the last kept bit is 0, so that ties go to even."""
    all_bits = values.view(uint32)
    for start in range(0, values.size, BLOCK_VALUES):
        stop = min(start + BLOCK_VALUES, values.size)
        part, bits, word = values[start:stop], all_bits[start:stop], words[start:stop]
        for i in range(bits.size):
            x = bits[i]
            rounded = uint32(x + uint32(0x7FFF) + (x >> uint32(16) & uint32(1))) >> uint32(16)
            is_nan = uint32(x & uint32(0x7FFFFFFF)) > _INFINITY
            rounded = uint32(0x7FC0) if is_nan else uint32(rounded)
            word[i] = rounded
            decoded = uint32(rounded << uint32(16))
            is_finite = uint32(decoded & uint32(0x7FFFFFFF)) < _INFINITY
            scratch[i] = part[i] - decoded.view(float32) if is_finite else float32(0)
        out = error[start:stop]
        for i in range(out.size):
            out[i] = scratch[i]


def decode_bf16(words: numpy.ndarray, values: numpy.ndarray) -> None:
    """The upper half of a float32."""
    bits = values.view(uint32)
    for i in range(bits.size):
        bits[i] = uint32(words[i]) << uint32(16)


def add_bf16(words: numpy.ndarray, total: numpy.ndarray) -> None:
    """Add what decode_bf16 would return."""
    for i in range(total.size):
        total[i] += uint32(uint32(words[i]) << uint32(16)).view(float32)


def encode_fp16(values: numpy.ndarray, words: numpy.ndarray, error: numpy.ndarray, scratch: numpy.ndarray) -> None:
    """Normal numbers are rounded as in encode_bf16, with another exponent. Subnormal numbers of fp16 are multiples of
    2^-24, the last bit of a float32 between 0.5 and 1: adding 0.5 rounds them, and leaves them in the lowest bits.
    """
    all_bits = values.view(uint32)
    for start in range(0, values.size, BLOCK_VALUES):
        stop = min(start + BLOCK_VALUES, values.size)
        part, bits, word = values[start:stop], all_bits[start:stop], words[start:stop]
        for i in range(bits.size):
            x = uint32(bits[i] & uint32(0x7FFFFFFF))
            # 0xC8000FFF is half of the range that is cut off, and 15 - 127 in the place of the exponent.
            normal = uint32(x + uint32(0xC8000FFF) + (x >> uint32(13) & uint32(1))) >> uint32(13)
            small = float32(x.view(float32) + float32(0.5)).view(uint32) - uint32(0x3F000000)
            rounded = uint32(small) if x < uint32(0x38800000) else uint32(normal)  # 2^-14
            # Values from 65520 on: halfway between the largest number and the one that would follow.
            rounded = uint32(0x7C00) if x >= uint32(0x477FF000) else rounded
            signed = uint32(rounded | (bits[i] >> uint32(16) & uint32(0x8000)))
            word[i] = uint32(0x7E00) if x > _INFINITY else signed
            # The result of decode_fp16, if it is finite.
            shifted = uint32(rounded << uint32(13))
            lowest = float32(uint32(shifted + uint32(0x38800000)).view(float32) - float32(2.0**-14)).view(uint32)
            decoded = uint32(lowest) if rounded < uint32(0x400) else uint32(shifted + uint32(0x38000000))
            decoded = uint32(decoded | (bits[i] & uint32(0x80000000)))
            scratch[i] = part[i] - decoded.view(float32) if rounded < uint32(0x7C00) else float32(0)
        out = error[start:stop]
        for i in range(out.size):
            out[i] = scratch[i]


def decode_fp16(words: numpy.ndarray, values: numpy.ndarray) -> None:
    """Move the exponent. A subnormal number becomes normal by adding 2^-14 in bits and subtracting it in float32."""
    bits = values.view(uint32)
    for i in range(bits.size):
        word = uint32(words[i])
        shifted = uint32((word & uint32(0x7FFF)) << uint32(13))
        small = float32(uint32(shifted + uint32(0x38800000)).view(float32) - float32(2.0**-14)).view(uint32)
        decoded = uint32(small) if shifted < uint32(0x800000) else uint32(shifted + uint32(0x38000000))
        decoded = uint32(shifted + uint32(0x70000000)) if shifted >= uint32(0x0F800000) else decoded
        bits[i] = decoded | (word & uint32(0x8000)) << uint32(16)


def add_fp16(words: numpy.ndarray, total: numpy.ndarray) -> None:
    """Add what decode_fp16 would return."""
    for i in range(total.size):
        word = uint32(words[i])
        shifted = uint32((word & uint32(0x7FFF)) << uint32(13))
        small = float32(uint32(shifted + uint32(0x38800000)).view(float32) - float32(2.0**-14)).view(uint32)
        decoded = uint32(small) if shifted < uint32(0x800000) else uint32(shifted + uint32(0x38000000))
        decoded = uint32(shifted + uint32(0x70000000)) if shifted >= uint32(0x0F800000) else decoded
        total[i] += uint32(decoded | (word & uint32(0x8000)) << uint32(16)).view(float32)
