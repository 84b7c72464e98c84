"""sign: only the sign of each value, in blocks of 256 with the mean |value| as scale; a twenty-eighth of the bytes.

The wire of n values, with b = n / 256 rounded up; the last block may be short:

    | scale of block 0 | scale of block 1 | ... | b scales, 4 bytes each
    | signs: n bits, value i in bit i modulo 8 of byte i / 8; 1 is negative |

For each block

    scale = sum of |value| / number of values        decoded = scale, or -scale for a negative value

One block of four values:

    values      4    -1     0.5    -2.5     scale (4 + 1 + 0.5 + 2.5) / 4 = 2
    signs       +     -     +       -
    decoded     2    -2     2      -2
    error       2     1    -1.5    -0.5     added to the next step's values

- The sum of a block is made in float64 by halves: |value i| and |value i + 128| first, then i and i + 64, until one is
  left; missing values of a short block are 0. So every machine rounds it in the same way.
- |error| is at most the largest |value| of the block. With this scale, the sum of the squared errors is that of the
  squared values less n scale^2, the least that any scale gives.
- A block of one |value| is exact. Encoding what was decoded gives the same wire.
- -0 counts as negative. A block of zeros has scale 0.
- Infinity or NaN in a block: its scale is NaN, its signs are 0, all of it decodes to NaN on every rank.

Without error feedback, training with signs may not converge. So a sum in this form is gathered, and not coded again;
see mpitrain/allreduce/compressed.py.

Cost: 1/8 + 4 / 256 = 0.141 bytes per value. Source: Karimireddy, Rebjock, Stich and Jaggi, Error Feedback Fixes SignSGD
and other Gradient Compression Schemes, ICML 2019, arXiv:1901.09847, algorithm 1 (the scale, the feedback); in blocks:
Zheng, Huang and Kwok, Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019,
arXiv:1905.10936.
"""

from __future__ import annotations

import numpy
from numpy import float32, float64, uint8, uint32

from mpitrain.compression import kernels
from mpitrain.compression.blocks import decoding, pieces
from mpitrain.compression.codec import PIECE_VALUES, ArrayCodec, Codec, Passes
from mpitrain.compression.kernels import BLOCK_VALUES

SCALE, SIGNS = numpy.dtype(numpy.float32), numpy.dtype(numpy.uint8)
_MAGNITUDE, _INFINITY = uint32(0x7FFFFFFF), uint32(0x7F800000)
_SIGN = uint32(0x80000000)
_NAN = float32(numpy.nan)


def sign(compiled: bool) -> Codec:
    """A bit for each value, in blocks of 256 with one scale each."""
    passes = fast() if compiled else twin()
    return ArrayCodec("sign", parts, passes, compiled, relative_error=1.0, loss="costs", gathered=True)


def parts(count: int) -> list[tuple[numpy.dtype, int]]:
    """A scale for each block, then a bit for each value."""
    return [(SCALE, -(-count // BLOCK_VALUES)), (SIGNS, -(-count // 8))]


def fast() -> Passes:
    """Return the compiled kernels."""
    scratch, halves = numpy.empty(BLOCK_VALUES, numpy.float32), numpy.empty(BLOCK_VALUES, numpy.float64)
    return kernels.compiled_passes(encode_sign, decode_sign, add_sign, scratch, halves)


def encode_sign(
    values: numpy.ndarray,
    scales: numpy.ndarray,
    signs: numpy.ndarray,
    error: numpy.ndarray,
    scratch: numpy.ndarray,
    halves: numpy.ndarray,
) -> None:
    """For Numba: see the module, and kernels.py for the types and the scratch."""
    all_bits = values.view(uint32)
    for block in range(scales.size):
        start = block * BLOCK_VALUES
        stop = min(start + BLOCK_VALUES, values.size)
        part, bits, octets = values[start:stop], all_bits[start:stop], signs[start // 8 : (stop + 7) // 8]
        largest = uint32(0)
        for i in range(bits.size):
            magnitude = uint32(bits[i] & _MAGNITUDE)
            largest = max(largest, magnitude)
            halves[i] = float64(magnitude.view(float32))
        halves[part.size :] = 0.0
        length = BLOCK_VALUES // 2
        while length > 0:
            for i in range(length):
                halves[i] += halves[i + length]
            length //= 2
        octets[:] = uint8(0)
        if largest < _INFINITY:
            scale = float32(halves[0] / part.size)
            scales[block] = scale
            scale_bits = uint32(scale.view(uint32))
            for i in range(bits.size):
                octets[i // 8] |= uint8(uint32(bits[i] >> uint32(31)) << uint32(i % 8))
                scratch[i] = part[i] - uint32((bits[i] & _SIGN) | scale_bits).view(float32)
        else:
            scales[block] = _NAN
            for i in range(part.size):
                scratch[i] = 0
        out = error[start:stop]
        for i in range(out.size):
            out[i] = scratch[i]


def decode_sign(scales: numpy.ndarray, signs: numpy.ndarray, values: numpy.ndarray) -> None:
    """For Numba: the scale with the sign of each value."""
    all_bits, scale_bits = values.view(uint32), scales.view(uint32)
    for block in range(scales.size):
        start = block * BLOCK_VALUES
        bits, scale = all_bits[start : start + BLOCK_VALUES], scale_bits[block]
        octets = signs[start // 8 : (start + bits.size + 7) // 8]
        for i in range(bits.size):
            bits[i] = scale | uint32(uint32(octets[i // 8]) >> uint32(i % 8)) << uint32(31)


def add_sign(scales: numpy.ndarray, signs: numpy.ndarray, total: numpy.ndarray) -> None:
    """For Numba: add what decode_sign would return."""
    scale_bits = scales.view(uint32)
    for block in range(scales.size):
        start = block * BLOCK_VALUES
        part, scale = total[start : start + BLOCK_VALUES], scale_bits[block]
        octets = signs[start // 8 : (start + part.size + 7) // 8]
        for i in range(part.size):
            part[i] += uint32(scale | uint32(uint32(octets[i // 8]) >> uint32(i % 8)) << uint32(31)).view(float32)


def twin() -> Passes:
    """Return the reference, in NumPy passes."""
    scratch = numpy.empty(PIECE_VALUES, numpy.float32)
    bits = numpy.empty(PIECE_VALUES, bool)
    rows_at_once = PIECE_VALUES // BLOCK_VALUES // 16  # bounds the memory of the sums in float64

    def decoded(wire: tuple[numpy.ndarray, ...], values: slice, blocks: slice) -> numpy.ndarray:
        scales, signs = wire
        count = values.stop - values.start
        into = scratch[:count]
        into.reshape(scales[blocks].size, -1)[...] = scales[blocks, None]
        unpacked = numpy.unpackbits(signs[values.start // 8 : (values.stop + 7) // 8], count=count, bitorder="little")
        numpy.bitwise_or(into.view(uint32), numpy.left_shift(unpacked, 31, dtype=uint32), out=into.view(uint32))
        return into

    def means(rows: numpy.ndarray) -> numpy.ndarray:
        halves = numpy.zeros((len(rows), BLOCK_VALUES))
        numpy.abs(rows, out=halves[:, : rows.shape[1]], casting="unsafe")
        length = BLOCK_VALUES // 2
        while length:
            halves[:, :length] += halves[:, length : 2 * length]
            length //= 2
        mean: numpy.ndarray = (halves[:, 0] / rows.shape[1]).astype(float32)
        return mean

    def small_pieces(count: int) -> list[tuple[slice, slice]]:
        return [
            (
                slice(
                    values.start + BLOCK_VALUES * row,
                    min(values.start + BLOCK_VALUES * (row + rows_at_once), values.stop),
                ),
                slice(blocks.start + row, min(blocks.start + row + rows_at_once, blocks.stop)),
            )
            for values, blocks in pieces(count, BLOCK_VALUES)
            for row in range(0, blocks.stop - blocks.start, rows_at_once)
        ]

    def encode(values: numpy.ndarray, wire: tuple[numpy.ndarray, ...], error: numpy.ndarray) -> None:
        scales, signs = wire
        for part, blocks in small_pieces(values.size):
            rows = values[part].reshape(scales[blocks].size, -1)
            with numpy.errstate(all="ignore"):  # infinity and NaN are ordinary values here
                is_finite = numpy.isfinite(rows).all(axis=1)
                scales[blocks] = means(rows)
                scales[blocks][~is_finite] = numpy.nan
                negative = numpy.signbit(rows, out=bits[: rows.size].reshape(rows.shape))
                negative[~is_finite] = False
                signs[part.start // 8 : (part.stop + 7) // 8] = numpy.packbits(negative.ravel(), bitorder="little")
                if error.size:
                    difference = error[part].reshape(rows.shape)
                    numpy.subtract(rows, decoded(wire, part, blocks).reshape(rows.shape), out=difference)
                    difference[~is_finite] = 0

    return Passes(encode, *decoding(small_pieces, decoded))
