"""int4: blocks of 64 values, each as one float32 scale and 64 whole numbers from -7 to 7; a seventh of the bytes.

The wire of n values, with b = n / 64 rounded up; the last block may be short:

    | scale of block 0 | scale of block 1 | ... | b scales, 4 bytes each
    | codes of block 0: 32 bytes | codes of block 1 | ... | n / 2 bytes, rounded up; two codes in each

A value of even index is in a byte's lower four bits, a value of odd index in the upper four, both in two's complement.
If the last byte holds only one value, its upper bits are zeros. Scale, rounding and the rest are as in int8.py, with 7
for 127:

    scale = largest |value| / 7        code = value x (7 / largest |value|), rounded        decoded = code x scale

One block of five values:

    values      3       -7       0.4     1.5     2.5
    scale 1: codes
                3       -7       0       2       2
    bytes       0x93             0x20            0x02
    decoded     3       -7       0       2       2
    error       0        0       0.4    -0.5     0.5     at most scale / 2; it is added to the next step's values

- |error| <= scale (0.5 + 2^-18): half a step, and the rounding of four float32 operations, each by at most 2^-24 of up
  to 7 steps.
- A block whose largest |value| is below 7 x 2^-126 = 8.2e-38 is encoded as zeros; all of it goes to the error.
- Infinity or NaN in a block: its scale is NaN, its codes are 0, all of it decodes to NaN on every rank.
- 7 x the largest scale is finite, so no scale is limited, unlike the scales of int8.

The blocks are shorter than int8's, because so few steps leave most values of a long block at 0. For normally
distributed values, the root mean square of the error is 10.8 % of that of the values with blocks of 64; 9.7 % with
blocks of 32, for 11 % more bytes; 12.7 % with blocks of 256, for 8 % fewer.

Cost: 0.5 + 4 / 64 = 0.5625 bytes per value. Source: as for int8.py; blocks of 64 for 4 bits: Dettmers et al., QLoRA,
NeurIPS 2023 (with other codes, for weights at rest).
"""

from __future__ import annotations

import numpy

from mpitrain.compression import blocks, kernels
from mpitrain.compression.codec import PIECE_VALUES, ArrayCodec, Codec, Passes
from mpitrain.compression.kernels import INT4_BLOCK_VALUES, INT4_LARGEST_SCALE, INT4_SMALLEST_ABSMAX

SCALE, CODES = numpy.dtype(numpy.float32), numpy.dtype(numpy.uint8)


def int4(compiled: bool) -> Codec:
    """Whole numbers from -7 to 7, in blocks of 64 with one scale each."""
    passes, error = fast() if compiled else twin(), (0.5 + 2.0**-18) / 7
    return ArrayCodec("int4", parts, passes, compiled, relative_error=error, device_file="codec.cu")


def parts(count: int) -> list[tuple[numpy.dtype, int]]:
    """A scale for each block, then half a byte for each value."""
    return [(SCALE, -(-count // INT4_BLOCK_VALUES)), (CODES, -(-count // 2))]


def fast() -> Passes:
    """Return the compiled kernels."""
    scratch, nibbles = numpy.empty(INT4_BLOCK_VALUES, numpy.float32), numpy.zeros(INT4_BLOCK_VALUES, numpy.int8)
    return kernels.compiled_passes(kernels.encode_int4, kernels.decode_int4, kernels.add_int4, scratch, nibbles)


def twin() -> Passes:
    """Return the reference, in NumPy passes."""
    scratch = numpy.empty(PIECE_VALUES, numpy.int8)

    def write(codes: numpy.ndarray, part: slice, rounded: numpy.ndarray) -> None:
        nibbles = scratch[: rounded.size + rounded.size % 2]
        nibbles[-1:] = 0
        numpy.copyto(nibbles[: rounded.size], rounded, casting="unsafe")
        low, high = nibbles.view(numpy.uint8)[::2], nibbles.view(numpy.uint8)[1::2]
        numpy.left_shift(high, 4, out=high)
        numpy.bitwise_and(low, 15, out=low)
        numpy.bitwise_or(low, high, out=codes[part.start // 2 : (part.stop + 1) // 2])

    def read(codes: numpy.ndarray, part: slice) -> numpy.ndarray:
        packed = codes[part.start // 2 : (part.stop + 1) // 2].view(numpy.int8)
        nibbles = scratch[: 2 * packed.size]
        # Shift to the upper half and back, to extend the sign.
        numpy.right_shift(numpy.left_shift(packed, 4, out=nibbles[::2]), 4, out=nibbles[::2])
        numpy.right_shift(packed, 4, out=nibbles[1::2])
        return nibbles[: part.stop - part.start]

    return blocks.twin(INT4_BLOCK_VALUES, 7, INT4_SMALLEST_ABSMAX, INT4_LARGEST_SCALE, write, read)
