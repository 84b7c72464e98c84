"""bf16 and fp16: every value as a 16-bit float, half the bytes.

    float32    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm       the wire of n values: n 16-bit words
    bf16       s eeeeeeee mmmmmmm                       the same range, 8 significant bits
    fp16       s eeeee mmmmmmmmmm                       6.1e-5 to 65504 (coarser from 6e-8), 11 significant bits

Rounding is to nearest, ties to even. Four values: 1 + 2^-8 lies halfway between the bf16 numbers 1 and 1.0078125, and
is rounded to the even one; 65520 lies halfway between the largest fp16 number and the next one that would follow.

    values          1.00390625     0.1             65520       1e-8
    bf16 decodes    1              0.10009765625   65536       1.0012e-08
    error           0.00390625     -9.765e-05      -16         -1.2e-11
    fp16 decodes    1.00390625     0.0999755859    infinity    0
    error           0              2.441e-05       0           1e-8

A finite value beyond the format's range becomes infinity, as in every cast, so a sum that is too large is visible.
Every NaN becomes the same NaN. Within the range, the error is at most half a unit in the last place, and is exact in
float32: value = decoded + error without rounding. decode is exact, so encoding again changes nothing.

Cost: 2 bytes per value. Source: IEEE 754-2019, section 4.3.1 (rounding) and 3.6 (binary16); bfloat16: Kalamkar et al.,
A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322 (2019). Error feedback: Seide et al., 1-Bit Stochastic
Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
"""

from __future__ import annotations

import ml_dtypes
import numpy

from mpitrain.compression import kernels
from mpitrain.compression.codec import PIECE_VALUES, ArrayCodec, Codec, Passes

WORD = numpy.dtype(numpy.uint16)


def bfloat16(compiled: bool) -> Codec:
    """The upper half of a float32, rounded."""
    passes = (
        kernels.compiled_passes(kernels.encode_bf16, kernels.decode_bf16, kernels.add_bf16, _scratch())
        if compiled
        else twin(numpy.dtype(ml_dtypes.bfloat16), 0x7FC0)
    )
    return ArrayCodec(
        "bf16", parts, passes, compiled, relative_error=2.0**-8, may_overflow=True, device_file="codec.cu"
    )


def float16(compiled: bool) -> Codec:
    """IEEE's half precision: more digits than bf16, but a much smaller range."""
    passes = (
        kernels.compiled_passes(kernels.encode_fp16, kernels.decode_fp16, kernels.add_fp16, _scratch())
        if compiled
        else twin(numpy.dtype(numpy.float16), 0x7E00)
    )
    return ArrayCodec(
        "fp16", parts, passes, compiled, relative_error=2.0**-11, may_overflow=True, device_file="codec.cu"
    )


def parts(count: int) -> list[tuple[numpy.dtype, int]]:
    """One word for each value."""
    return [(WORD, count)]


def _scratch() -> numpy.ndarray:
    return numpy.empty(kernels.BLOCK_VALUES, numpy.float32)


def twin(dtype: numpy.dtype, nan: int) -> Passes:
    """Return the reference, which uses NumPy's own casts; `nan` is the word for every NaN."""
    decoded_scratch = numpy.empty(PIECE_VALUES, numpy.float32)
    mask_scratch = numpy.empty(PIECE_VALUES, bool)

    def pieces(count: int) -> list[slice]:
        return [slice(start, min(start + PIECE_VALUES, count)) for start in range(0, count, PIECE_VALUES)]

    def encode(values: numpy.ndarray, wire: tuple[numpy.ndarray, ...], error: numpy.ndarray) -> None:
        (words,) = wire
        for piece in pieces(values.size):
            part, word = values[piece], words[piece]
            mask, decoded = mask_scratch[: part.size], decoded_scratch[: part.size]
            with numpy.errstate(all="ignore"):  # infinity and NaN are ordinary values here
                numpy.copyto(word.view(dtype), part, casting="unsafe")
                numpy.copyto(word, nan, where=numpy.isnan(part, out=mask))
                if error.size:
                    numpy.copyto(decoded, word.view(dtype))
                    numpy.subtract(part, decoded, out=error[piece])
                    finite = numpy.isfinite(decoded, out=mask)
                    numpy.copyto(error[piece], 0, where=numpy.logical_not(finite, out=mask))

    def decode(wire: tuple[numpy.ndarray, ...], values: numpy.ndarray) -> None:
        numpy.copyto(values, wire[0].view(dtype))

    def add(wire: tuple[numpy.ndarray, ...], total: numpy.ndarray) -> None:
        for piece in pieces(total.size):
            decoded = decoded_scratch[: piece.stop - piece.start]
            numpy.copyto(decoded, wire[0][piece].view(dtype))
            with numpy.errstate(all="ignore"):
                numpy.add(total[piece], decoded, out=total[piece])

    return Passes(encode, decode, add)
