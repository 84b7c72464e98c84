"""The common part of codecs with blocks (int8, int4): the reference in NumPy passes, over rows of one block each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy

from mpitrain.compression.codec import PIECE_VALUES, Passes

# Write puts rounded float32 numbers into the codes, for the values in the slice. Read returns them as int8.
Write = Callable[[numpy.ndarray, slice, numpy.ndarray], None]
Read = Callable[[numpy.ndarray, slice], numpy.ndarray]
# Returns the values and the blocks to process at a time; see `pieces`.
Cut = Callable[[int], Iterable[tuple[slice, slice]]]
# Returns the values of the slice, which covers whole blocks, from the arrays in a wire.
Decoded = Callable[[tuple[numpy.ndarray, ...], slice, slice], numpy.ndarray]
DecodeOrAdd = Callable[[tuple[numpy.ndarray, ...], numpy.ndarray], None]


def twin(
    block_values: int,
    largest_code: int,
    smallest_absmax: numpy.float32,
    largest_scale: numpy.float32,
    write: Write,
    read: Read,
) -> Passes:
    """The passes of a codec with a scale for each block; int8.py has the rules.

    `largest_scale` is the largest float32 that is finite after a multiplication by `largest_code`. The quotient of the
    largest float32 may be rounded up to a larger one.
    """
    scratch = numpy.empty(PIECE_VALUES, numpy.float32)
    steps = numpy.float32(largest_code)

    def decoded(wire: tuple[numpy.ndarray, ...], values: slice, blocks: slice) -> numpy.ndarray:
        scales, codes = wire
        rows = read(codes, values).reshape(scales[blocks].size, -1)
        into = scratch[: rows.size].reshape(rows.shape)
        numpy.multiply(rows, scales[blocks, None], out=into)
        return into

    def encode(values: numpy.ndarray, wire: tuple[numpy.ndarray, ...], error: numpy.ndarray) -> None:
        scales, codes = wire
        for part, blocks in pieces(values.size, block_values):
            rows = values[part].reshape(scales[blocks].size, -1)
            work = scratch[: rows.size].reshape(rows.shape)
            with numpy.errstate(all="ignore"):  # infinity and NaN are ordinary values here
                largest = numpy.abs(rows, out=work).max(axis=1)
                is_finite, is_zero = numpy.isfinite(largest), largest < smallest_absmax
                scales[blocks] = numpy.minimum(largest / steps, largest_scale)
                scales[blocks][is_zero] = 0
                scales[blocks][~is_finite] = numpy.nan
                inverse = steps / largest
                inverse[is_zero] = 0
                numpy.rint(numpy.multiply(rows, inverse[:, None], out=work), out=work)
                work[~is_finite] = 0
                write(codes, part, work.ravel())
                if error.size:
                    difference = error[part].reshape(rows.shape)
                    numpy.subtract(rows, decoded(wire, part, blocks), out=difference)
                    difference[~is_finite] = 0

    return Passes(encode, *decoding(partial(pieces, block_values=block_values), lambda *which: decoded(*which).ravel()))


def decoding(cut: Cut, decoded: Decoded) -> tuple[DecodeOrAdd, DecodeOrAdd]:
    """Return the functions decode and add of Passes."""

    def decode(wire: tuple[numpy.ndarray, ...], values: numpy.ndarray) -> None:
        for part, blocks in cut(values.size):
            values[part] = decoded(wire, part, blocks)

    def add(wire: tuple[numpy.ndarray, ...], total: numpy.ndarray) -> None:
        for part, blocks in cut(total.size):
            with numpy.errstate(all="ignore"):
                numpy.add(total[part], decoded(wire, part, blocks), out=total[part])

    return decode, add


def pieces(count: int, block_values: int) -> Iterator[tuple[slice, slice]]:
    """Yield the values and the blocks to process at a time: equally long blocks, then the short one if there is one."""
    whole = count - count % block_values
    for start in range(0, whole, PIECE_VALUES):
        stop = min(start + PIECE_VALUES, whole)
        yield slice(start, stop), slice(start // block_values, stop // block_values)
    if whole < count:
        yield slice(whole, count), slice(whole // block_values, whole // block_values + 1)
