"""top_k: the largest values of each block of 4096, 1 % by default; all others wait for later steps.

`top_k:0.05` keeps 5 %. A block of n values keeps k = density x n, rounded to the nearest, but at least one: otherwise
no value of a short block would ever be sent. The wire has the kept values of all blocks, each block in order of the
place; then the places of these values in their blocks:

    | values of block 0: k float32 | values of block 1 | ... | places of block 0: k uint16 | places of block 1 | ...

Two blocks of four values, density 0.5:

    values      3    -5     0.5     4      |    1     1     1     0
    places      1     3                    |    0     1                 of equal |values|, the first
    decoded     0    -5     0       4      |    1     1     0     0
    error       3     0     0.5     0      |    0     0     1     0     added to the next step's values

- Kept values are exact. Where the |values| of a block are equal, the lowest places are kept, so every rank and every
  machine that has the same values sends the same wire.
- Infinity or NaN in a block: its values are NaN, its places are 0 to k - 1, and all of it decodes to NaN on every rank.
- `add` touches only the kept values. Encoding what was decoded gives the same wire.

Values are compared by the bits of |value|, which have the order of the numbers. The k-th largest is found digit by
digit: how many values have each of the 2048 upper digits, then the same with the next 10 bits among those with the
right upper digit, then with the last 10 bits.

Cost: 6 bytes for each kept value, so 0.06 bytes per value with 1 %. Source: Stich, Cordonnier and Jaggi, Sparsified SGD
with Memory, NeurIPS 2018, arXiv:1809.07599 (top-k with k of at least 1, and error feedback); Aji and Heafield, Sparse
Communication for Distributed Gradient Descent, EMNLP 2017. They choose among all values or those of a layer. In blocks,
the error has the same bound: at most the fraction 1 - k/n of the sum of squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy
from numpy import float32, int64, uint16, uint32

from mpitrain.compression import kernels
from mpitrain.compression.codec import ArrayCodec, Codec, Passes
from mpitrain.errors import ConfigError

BLOCK_VALUES = 4096
DENSITY = 0.01
LOWEST, HIGHEST = 1 / BLOCK_VALUES, 0.5  # densities
_KEPT, _PLACE = numpy.dtype(numpy.float32), numpy.dtype(numpy.uint16)
_MAGNITUDE, _INFINITY = uint32(0x7FFFFFFF), uint32(0x7F800000)
_NAN = float32(numpy.nan)
_DIGITS = 2048  # 11 bits, and two times 10


def top_k(compiled: bool, density: float = DENSITY, name: str = "top_k") -> Codec:
    """The largest values of each block, with their places. `name` tells this density from others."""
    passes = fast(density) if compiled else twin(density)
    return ArrayCodec(
        name,
        partial(parts, density),
        passes,
        compiled,
        relative_error=1.0,
        gathered=True,
        places_exist=partial(places_exist, density),
    )


def of_density(text: str) -> Callable[[bool], Codec]:
    """Return the factory for `top_k:TEXT`.

    Raises:
        ConfigError: the text is not a density.
    """
    try:
        density = float(text)
    except ValueError:
        density = math.nan
    if not LOWEST <= density <= HIGHEST:
        raise ConfigError(
            f"compression top_k:{text}: the density is {text!r}; allowed is the fraction of the values to send, from "
            f"{LOWEST:.5f} (one of {BLOCK_VALUES}) to {HIGHEST}, as in top_k:{DENSITY}"
        )
    return partial(top_k, density=density, name=f"top_k:{text}")


def kept_of(density: float, count: int) -> int:
    """Return how many values a block of `count` values keeps."""
    return max(1, math.floor(density * count + 0.5))


def numbers_kept(density: float, count: int) -> tuple[int, int]:
    """Return how many values a whole block keeps, and the short last block of `count` values, if there is one."""
    return kept_of(density, BLOCK_VALUES), kept_of(density, count % BLOCK_VALUES)


def parts(density: float, count: int) -> list[tuple[numpy.dtype, int]]:
    """The kept values of all blocks, then their places."""
    most, last = numbers_kept(density, count)
    kept = count // BLOCK_VALUES * most + (last if count % BLOCK_VALUES else 0)
    return [(_KEPT, kept), (_PLACE, kept)]


def places_exist(density: float, arrays: tuple[numpy.ndarray, ...], count: int) -> bool:
    """Return whether all places of a wire of `count` values are in their blocks."""
    _, places = arrays
    most, _ = numbers_kept(density, count)
    whole = count // BLOCK_VALUES * most
    return bool((places[:whole] < BLOCK_VALUES).all() and (places[whole:] < count % BLOCK_VALUES).all())


def fast(density: float) -> Passes:
    """Return the compiled kernels."""
    encode, decode, add = (kernels.compiled(kernel) for kernel in (encode_top_k, decode_top_k, add_top_k))
    numbers = numpy.empty(_DIGITS, numpy.int64)
    return Passes(
        lambda values, wire, error: encode(values, *wire, error, numbers, *numbers_kept(density, values.size)),
        lambda wire, values: decode(*wire, values, *numbers_kept(density, values.size)),
        lambda wire, total: add(*wire, total, *numbers_kept(density, total.size)),
    )


def encode_top_k(
    values: numpy.ndarray,
    kept: numpy.ndarray,
    places: numpy.ndarray,
    error: numpy.ndarray,
    numbers: numpy.ndarray,
    most: int,
    last: int,
) -> None:
    """For Numba: see the module. A block keeps `most` values, a short one `last`; `numbers` counts the digits."""
    all_bits = values.view(uint32)
    begin = 0
    for start in range(0, values.size, BLOCK_VALUES):
        stop = min(start + BLOCK_VALUES, values.size)
        part, bits, out = values[start:stop], all_bits[start:stop], error[start:stop]
        count = most if part.size == BLOCK_VALUES else last
        its_kept, its_places = kept[begin : begin + count], places[begin : begin + count]
        begin += count
        largest = uint32(0)
        for i in range(bits.size):
            largest = max(largest, uint32(bits[i] & _MAGNITUDE))
        if largest >= _INFINITY:
            its_kept[:] = _NAN
            for i in range(count):
                its_places[i] = uint16(i)
            out[:] = float32(0)
            continue
        limit = uint32(0)  # the upper digits of the count-th largest |value|
        ties = int64(count)  # number of values to keep that have the digits of `limit` so far
        above = uint32(31)
        for shift in (uint32(20), uint32(10), uint32(0)):
            numbers[:] = 0
            width = uint32(above - shift)
            for i in range(bits.size):
                magnitude = uint32(bits[i] & _MAGNITUDE)
                if uint32(magnitude >> above) == uint32(limit >> above):
                    numbers[uint32(magnitude >> shift) & uint32((uint32(1) << width) - uint32(1))] += 1
            digit = int64((uint32(1) << width) - uint32(1))
            while numbers[digit] < ties:
                ties -= numbers[digit]
                digit -= 1
            limit = uint32(limit | uint32(uint32(digit) << shift))
            above = shift
        number = 0
        for i in range(bits.size):
            magnitude = uint32(bits[i] & _MAGNITUDE)
            is_tie = magnitude == limit and ties > 0
            if is_tie:
                ties -= 1
            if magnitude > limit or is_tie:
                its_kept[number] = part[i]
                its_places[number] = uint16(i)
                number += 1
        for i in range(out.size):
            out[i] = part[i]
        if out.size:
            for j in range(count):
                out[its_places[j]] = float32(0)


def decode_top_k(kept: numpy.ndarray, places: numpy.ndarray, values: numpy.ndarray, most: int, last: int) -> None:
    """For Numba: zeros, and the kept values in their places."""
    begin = 0
    for start in range(0, values.size, BLOCK_VALUES):
        part = values[start : start + BLOCK_VALUES]
        count = most if part.size == BLOCK_VALUES else last
        if numpy.isnan(kept[begin]):
            part[:] = _NAN
        else:
            part[:] = float32(0)
            for j in range(begin, begin + count):
                part[places[j]] = kept[j]
        begin += count


def add_top_k(kept: numpy.ndarray, places: numpy.ndarray, total: numpy.ndarray, most: int, last: int) -> None:
    """For Numba: add the kept values in their places."""
    begin = 0
    for start in range(0, total.size, BLOCK_VALUES):
        part = total[start : start + BLOCK_VALUES]
        count = most if part.size == BLOCK_VALUES else last
        if numpy.isnan(kept[begin]):
            for i in range(part.size):
                part[i] += _NAN
        else:
            for j in range(begin, begin + count):
                part[places[j]] += kept[j]
        begin += count


def twin(density: float) -> Passes:
    """Return the reference, in NumPy passes."""
    magnitudes, ordered = numpy.empty(BLOCK_VALUES, uint32), numpy.empty(BLOCK_VALUES, uint32)

    def blocks(count: int) -> Iterator[tuple[slice, slice]]:
        """The values of each block, and the kept ones."""
        begin = 0
        for start in range(0, count, BLOCK_VALUES):
            stop = min(start + BLOCK_VALUES, count)
            end = begin + kept_of(density, stop - start)
            yield slice(start, stop), slice(begin, end)
            begin = end

    def encode(values: numpy.ndarray, wire: tuple[numpy.ndarray, ...], error: numpy.ndarray) -> None:
        kept, places = wire
        for whole, chosen in blocks(values.size):
            part, count = values[whole], chosen.stop - chosen.start
            size = numpy.bitwise_and(part.view(uint32), _MAGNITUDE, out=magnitudes[: part.size])
            if size.max() >= _INFINITY:
                kept[chosen], places[chosen] = numpy.nan, numpy.arange(count)
                if error.size:
                    error[whole] = 0
                continue
            order = ordered[: part.size]
            order[:] = size
            order.partition(part.size - count)
            limit = order[part.size - count]
            larger, equal = numpy.flatnonzero(size > limit), numpy.flatnonzero(size == limit)
            its_places = numpy.sort(numpy.concatenate([larger, equal[: count - larger.size]]))
            kept[chosen], places[chosen] = part[its_places], its_places
            if error.size:
                error[whole] = part
                error[whole][its_places] = 0

    def decode(wire: tuple[numpy.ndarray, ...], values: numpy.ndarray) -> None:
        kept, places = wire
        for whole, chosen in blocks(values.size):
            values[whole] = numpy.nan if numpy.isnan(kept[chosen.start]) else 0
            values[whole][places[chosen]] = kept[chosen]

    def add(wire: tuple[numpy.ndarray, ...], total: numpy.ndarray) -> None:
        kept, places = wire
        with numpy.errstate(all="ignore"):
            for whole, chosen in blocks(total.size):
                if numpy.isnan(kept[chosen.start]):
                    total[whole] += float32(numpy.nan)
                else:
                    total[whole][places[chosen]] += kept[chosen]

    return Passes(encode, decode, add)
