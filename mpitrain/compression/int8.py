"""int8: blocks of 256 values, each as one float32 scale and 256 whole numbers from -127 to 127; a quarter of the bytes.

The wire of n values, with b = n / 256 rounded up; the last block may be short:

    | scale of block 0 | scale of block 1 | ... | b scales, 4 bytes each
    | codes of block 0: 256 bytes | codes of block 1 | ... | n codes, 1 byte each

All scales come first, so that both arrays are aligned and one loop runs over all codes. For each block

    scale = largest |value| / 127        code = value x (127 / largest |value|), rounded        decoded = code x scale

Rounding is to nearest, ties to even; there is no chance in it, so every rank gets the same. One block of five values:

    values      50    -127     0.4     1.5     2.5
    scale 1: codes
                50    -127     0       2       2
    decoded     50    -127     0       2       2
    error       0     0        0.4    -0.5     0.5     at most scale / 2; it is added to the next step's values

- |error| <= scale (0.5 + 2^-14): half a step, and the rounding of four float32 operations, each by at most 2^-24 of up
  to 127 steps.
- A block of one constant decodes to it exactly or, for 0.8 % of all numbers, to the float32 next to it. A block of
  zeros has scale 0 and decodes to zeros (-0 to 0). Encoding what was decoded gives the same wire.
- Infinity or NaN in a block: its scale is NaN, its codes are 0, all of it decodes to NaN on every rank. Nothing of an
  overflow gets lost.
- Largest |value| below 127 x 2^-126 = 1.5e-36: the scale would be subnormal, with fewer digits, and its reciprocal
  might be infinite. Such a block is encoded as zeros; all of it goes to the error.
- No scale is above 2.679e36, the largest one of which 127 times is finite: the largest float32 decodes to the one
  below.

Cost: 1 + 4 / 256 = 1.016 bytes a value. Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR
2016, and block-wise as in Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (with linear codes
here). Error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error
Feedback Fixes SignSGD, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from mpitrain.compression import kernels
from mpitrain.compression.codec import PIECE_VALUES, ArrayCodec, Codec, Passes
from mpitrain.compression.kernels import BLOCK_VALUES, LARGEST_SCALE, SMALLEST_ABSMAX

SCALE, CODE = numpy.dtype(numpy.float32), numpy.dtype(numpy.int8)


def int8(compiled: bool) -> Codec:
    """Whole numbers from -127 to 127 in blocks of 256 with a scale each."""
    return ArrayCodec("int8", parts, fast() if compiled else twin(), compiled)


def parts(count: int) -> list[tuple[numpy.dtype, int]]:
    """A scale for each block, then a code for each value."""
    return [(SCALE, -(-count // BLOCK_VALUES)), (CODE, count)]


def fast() -> Passes:
    """The kernels, compiled."""
    encode, decode, add = (
        kernels.compiled(kernel) for kernel in (kernels.encode_int8, kernels.decode_int8, kernels.add_int8)
    )
    scratch = numpy.empty(BLOCK_VALUES, numpy.float32)
    return Passes(
        lambda values, wire, error: encode(values, *wire, error, scratch),
        lambda wire, values: decode(*wire, values),
        lambda wire, total: add(*wire, total),
    )


def twin() -> Passes:
    """The reference, in NumPy passes over rows of one block each."""
    scratch = numpy.empty(PIECE_VALUES, numpy.float32)

    def decoded(wire: tuple[numpy.ndarray, ...], values: slice, blocks: slice) -> numpy.ndarray:
        scales, codes = wire
        rows = codes[values].reshape(scales[blocks].size, -1)
        into = scratch[: rows.size].reshape(rows.shape)
        numpy.multiply(rows, scales[blocks, None], out=into)
        return into

    def encode(values: numpy.ndarray, wire: tuple[numpy.ndarray, ...], error: numpy.ndarray) -> None:
        scales, codes = wire
        for part, blocks in pieces(values.size):
            rows = values[part].reshape(scales[blocks].size, -1)
            work = scratch[: rows.size].reshape(rows.shape)
            with numpy.errstate(all="ignore"):  # infinity and NaN are values like any other here
                largest = numpy.abs(rows, out=work).max(axis=1)
                is_finite, is_zero = numpy.isfinite(largest), largest < SMALLEST_ABSMAX
                scales[blocks] = numpy.minimum(largest / numpy.float32(127), LARGEST_SCALE)
                scales[blocks][is_zero] = 0
                scales[blocks][~is_finite] = numpy.nan
                inverse = numpy.float32(127) / largest
                inverse[is_zero] = 0
                numpy.rint(numpy.multiply(rows, inverse[:, None], out=work), out=work)
                work[~is_finite] = 0
                numpy.copyto(codes[part].reshape(rows.shape), work, casting="unsafe")
                if error.size:
                    difference = error[part].reshape(rows.shape)
                    numpy.subtract(rows, decoded(wire, part, blocks), out=difference)
                    difference[~is_finite] = 0

    def decode(wire: tuple[numpy.ndarray, ...], values: numpy.ndarray) -> None:
        for part, blocks in pieces(values.size):
            values[part] = decoded(wire, part, blocks).ravel()

    def add(wire: tuple[numpy.ndarray, ...], total: numpy.ndarray) -> None:
        for part, blocks in pieces(total.size):
            with numpy.errstate(all="ignore"):
                numpy.add(total[part], decoded(wire, part, blocks).ravel(), out=total[part])

    return Passes(encode, decode, add)


def pieces(count: int) -> Iterator[tuple[slice, slice]]:
    """Which values and which blocks to take at a time: equally long blocks, then the short one if there is one."""
    whole = count - count % BLOCK_VALUES
    for start in range(0, whole, PIECE_VALUES):
        stop = min(start + PIECE_VALUES, whole)
        yield slice(start, stop), slice(start // BLOCK_VALUES, stop // BLOCK_VALUES)
    if whole < count:
        yield slice(whole, count), slice(whole // BLOCK_VALUES, whole // BLOCK_VALUES + 1)
