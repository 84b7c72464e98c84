"""int8: blocks of 256 values, each as one float32 scale and 256 whole numbers from -127 to 127; a quarter of the bytes.

The wire of n values, with b = n / 256 rounded up; the last block may be short:

    | scale of block 0 | scale of block 1 | ... | b scales, 4 bytes each
    | codes of block 0: 256 bytes | codes of block 1 | ... | n codes, 1 byte each

All scales come first, so that both arrays are aligned and one loop runs over all codes. For each block

    scale = largest |value| / 127        code = value x (127 / largest |value|), rounded        decoded = code x scale

Rounding is to nearest, ties to even. It is not random, so every rank gets the same codes. One block of five values:

    values      50    -127     0.4     1.5     2.5
    scale 1: codes
                50    -127     0       2       2
    decoded     50    -127     0       2       2
    error       0     0        0.4    -0.5     0.5     at most scale / 2; it is added to the next step's values

- |error| <= scale (0.5 + 2^-14): half a step, and the rounding of four float32 operations, each by at most 2^-24 of up
  to 127 steps.
- A block of one constant decodes to it exactly or, for 0.8 % of all numbers, to the float32 next to it. A block of
  zeros has scale 0 and decodes to zeros (-0 to 0). Encoding what was decoded gives the same wire.
- Infinity or NaN in a block: its scale is NaN, its codes are 0, all of it decodes to NaN on every rank. So an overflow
  is never hidden.
- Largest |value| below 127 x 2^-126 = 1.5e-36: the scale would be subnormal, with fewer digits, and its reciprocal
  might be infinite. Such a block is encoded as zeros; all of it goes to the error.
- No scale is above 2.679e36, the largest scale for which 127 x scale is finite. So the largest float32 decodes to the
  float32 below it.

Cost: 1 + 4 / 256 = 1.016 bytes per value. Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR
2016, and block-wise as in Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (with linear codes
here). Error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error
Feedback Fixes SignSGD, ICML 2019.
"""

from __future__ import annotations

import numpy

from mpitrain.compression import blocks, kernels
from mpitrain.compression.codec import ArrayCodec, Codec, Passes
from mpitrain.compression.kernels import BLOCK_VALUES, LARGEST_SCALE, SMALLEST_ABSMAX

SCALE, CODE = numpy.dtype(numpy.float32), numpy.dtype(numpy.int8)


def int8(compiled: bool) -> Codec:
    """Whole numbers from -127 to 127, in blocks of 256 with one scale each."""
    passes, error = fast() if compiled else twin(), (0.5 + 2.0**-14) / 127
    return ArrayCodec("int8", parts, passes, compiled, relative_error=error, device_file="codec.cu")


def parts(count: int) -> list[tuple[numpy.dtype, int]]:
    """A scale for each block, then a code for each value."""
    return [(SCALE, -(-count // BLOCK_VALUES)), (CODE, count)]


def fast() -> Passes:
    """Return the compiled kernels."""
    scratch = numpy.empty(BLOCK_VALUES, numpy.float32)
    return kernels.compiled_passes(kernels.encode_int8, kernels.decode_int8, kernels.add_int8, scratch)


def twin() -> Passes:
    """Return the reference, in NumPy passes."""

    def write(codes: numpy.ndarray, part: slice, rounded: numpy.ndarray) -> None:
        numpy.copyto(codes[part], rounded, casting="unsafe")

    return blocks.twin(BLOCK_VALUES, 127, SMALLEST_ABSMAX, LARGEST_SCALE, write, lambda codes, part: codes[part])
