"""The bits of blocks of kept values: levels, codes and places; quantised_top_k.py has the format.

`pack` makes them from kept values and places, and `unpack` does the reverse, both for all blocks of a piece. The
kernels of Numba and the NumPy passes give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy
from numpy import float32, float64, int64, uint8, uint16, uint32

from mpitrain.compression import kernels
from mpitrain.compression.top_k import BLOCK_VALUES

_SIGN, _MAGNITUDE = uint32(0x80000000), uint32(0x7FFFFFFF)
_NAN = float32(numpy.nan)


class Form(NamedTuple):
    """The form of a block: how many values it keeps, how many lower bits a place has, and how many bytes its bits
    fill."""

    kept: int
    low: int
    num_bytes: int


class Packing(NamedTuple):
    """The work on the blocks of a piece. One form is for all blocks but the last, the other for the last block.

    Attributes:
        pack: makes levels and bits from kept values and places; writes the rest of each kept value into `error` at its
            place, unless `error` is empty.
        unpack: overwrites kept values and places with those in levels and bits.
    """

    pack: Callable[[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray, Form, Form], None]
    unpack: Callable[[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray, Form, Form], None]


def fast(bits: int, most: int) -> Packing:
    """Return the compiled kernels, for `bits` of a code and blocks that keep at most `most` values."""
    halves, part_of = numpy.empty(_power_of_two(most), numpy.float64), numpy.empty(most, numpy.int64)
    pack_codes, unpack_codes = kernels.compiled(pack_top_k), kernels.compiled(unpack_top_k)
    return Packing(
        lambda *arrays: pack_codes(*arrays, bits, halves, part_of),
        lambda *arrays: unpack_codes(*arrays, bits),
    )


def pack_top_k(
    kept: numpy.ndarray,
    places: numpy.ndarray,
    levels: numpy.ndarray,
    stream: numpy.ndarray,
    error: numpy.ndarray,
    whole: Form,
    last: Form,
    bits: int,
    halves: numpy.ndarray,
    part_of: numpy.ndarray,
) -> None:
    """For Numba: code the kept values, and write their rest into `error`, unless it is empty."""
    num_levels = 1 << (bits - 1)
    num_blocks = levels.size // num_levels
    all_bits, level_bits = kept.view(uint32), levels.view(uint32)
    begin, start = 0, 0
    for block in range(num_blocks):
        count, low, length = whole if block < num_blocks - 1 else last
        value, value_bits = kept[begin : begin + count], all_bits[begin : begin + count]
        place, level = places[begin : begin + count], levels[block * num_levels : (block + 1) * num_levels]
        octets = stream[start : start + length]
        begin += count
        start += length
        octets[:] = uint8(0)
        part_of[:count] = 0
        is_finite = not numpy.isnan(value[0])
        width = 1
        while width < count:
            width *= 2
        for depth in range(bits if is_finite else 0):
            for part in range((1 << depth) - 1, -1, -1):  # downwards, so that a new number does not equal a later one
                number = 0
                halves[:width] = 0.0
                for i in range(count):
                    if part_of[i] == part:
                        halves[i] = float64(uint32(value_bits[i] & _MAGNITUDE).view(float32))
                        number += 1
                half = width // 2
                while half > 0:
                    for i in range(half):
                        halves[i] += halves[i + half]
                    half //= 2
                mean = halves[0] / number if number else 0.0
                if depth == bits - 1:
                    level[part] = float32(mean)
                    continue
                for i in range(count):
                    if part_of[i] == part:
                        size = float64(uint32(value_bits[i] & _MAGNITUDE).view(float32))
                        part_of[i] = 2 * part + (1 if size > mean else 0)
        if not is_finite:
            level[:] = _NAN
        at, upper = 0, count * (bits + low)
        for i in range(count):
            code = int64(0)
            if is_finite:
                code = int64(value_bits[i] >> uint32(31)) | part_of[i] << 1
            for j in range(bits):
                octets[at >> 3] |= uint8((code >> j & 1) << (at & 7))
                at += 1
        for i in range(count):
            for j in range(low):
                octets[at >> 3] |= uint8((int64(place[i]) >> j & 1) << (at & 7))
                at += 1
            one = upper + (int64(place[i]) >> low) + i
            octets[one >> 3] |= uint8(1 << (one & 7))
        if error.size:
            out = error[block * BLOCK_VALUES :]
            for i in range(count):
                size_bits = level_bits[block * num_levels + part_of[i]]
                sent = uint32(size_bits | (value_bits[i] & _SIGN)).view(float32)
                out[place[i]] = float32(value[i] - sent) if is_finite else float32(0)


def unpack_top_k(
    kept: numpy.ndarray,
    places: numpy.ndarray,
    levels: numpy.ndarray,
    stream: numpy.ndarray,
    whole: Form,
    last: Form,
    bits: int,
) -> None:
    """For Numba: overwrite `kept` and `places` with the content of the wire."""
    num_levels = 1 << (bits - 1)
    num_blocks = levels.size // num_levels
    all_bits, level_bits = kept.view(uint32), levels.view(uint32)
    begin, start = 0, 0
    for block in range(num_blocks):
        count, low, length = whole if block < num_blocks - 1 else last
        octets = stream[start : start + length]
        at, one, end = 0, count * (bits + low), 8 * length
        for i in range(count):
            code = int64(0)
            for j in range(bits):
                code |= (int64(octets[at >> 3]) >> (at & 7) & 1) << j
                at += 1
            all_bits[begin + i] = level_bits[block * num_levels + (code >> 1)] | uint32(uint32(code & 1) << uint32(31))
        for i in range(count):
            lower = int64(0)
            for j in range(low):
                lower |= (int64(octets[at >> 3]) >> (at & 7) & 1) << j
                at += 1
            while one < end - 1 and not int64(octets[one >> 3]) >> (one & 7) & 1:
                one += 1
            places[begin + i] = uint16((one - count * (bits + low) - i) << low | lower)
            one += 1
        begin += count
        start += length


def twin(bits: int) -> Packing:
    """Return the reference, in NumPy passes over rows of one block each."""
    num_levels = 1 << (bits - 1)

    def rows(last: Form, whole: Form, *flats: numpy.ndarray) -> Iterator[tuple[Form, int, list[numpy.ndarray]]]:
        """The form, the number of the first block, and its rows of kept values, places, levels and bits."""
        num_before = flats[2].size // num_levels - 1
        for form, first, number in ((whole, 0, num_before), (last, num_before, 1)):
            if number:
                lengths = (form.kept, form.kept, num_levels, form.num_bytes)
                before = (whole.kept, whole.kept, num_levels, whole.num_bytes)
                yield (
                    form,
                    first,
                    [
                        flat[first * skipped : first * skipped + number * length].reshape(number, length)
                        for flat, length, skipped in zip(flats, lengths, before, strict=True)
                    ],
                )

    def pack(
        kept: numpy.ndarray,
        places: numpy.ndarray,
        levels: numpy.ndarray,
        stream: numpy.ndarray,
        error: numpy.ndarray,
        whole: Form,
        last: Form,
    ) -> None:
        for form, first, (value, place, level, octets) in rows(last, whole, kept, places, levels, stream):
            is_finite = ~numpy.isnan(value[:, 0])
            sizes = numpy.where(is_finite[:, None], numpy.abs(value), float32(0)).astype(float64)
            part_of = numpy.zeros(sizes.shape, numpy.uint8)
            for depth in range(bits):
                split = part_of * uint8(2)
                for part in range(1 << depth):
                    mean = _means(sizes, part_of == part)
                    if depth == bits - 1:
                        level[:, part] = mean
                    split += (part_of == part) & (sizes > mean[:, None])
                part_of = split if depth < bits - 1 else part_of
            level[~is_finite] = numpy.nan
            part_of[~is_finite] = 0
            negative = numpy.signbit(value) & is_finite[:, None]
            string = numpy.zeros((len(value), 8 * form.num_bytes), numpy.uint8)
            codes = part_of * uint8(2) + negative
            upper = form.kept * (bits + form.low)
            string[:, : form.kept * bits] = _digits(codes, bits)
            string[:, form.kept * bits : upper] = _digits(place, form.low)
            ones = upper + (place >> form.low).astype(numpy.int64) + numpy.arange(form.kept)
            numpy.put_along_axis(string, ones, uint8(1), axis=1)
            octets[...] = numpy.packbits(string, axis=1, bitorder="little")
            if error.size:
                sent = numpy.copysign(numpy.take_along_axis(level, part_of.astype(numpy.intp), axis=1), value)
                starts = (first + numpy.arange(len(value)))[:, None] * BLOCK_VALUES
                error[starts + place] = numpy.where(is_finite[:, None], value - sent, float32(0))

    def unpack(
        kept: numpy.ndarray,
        places: numpy.ndarray,
        levels: numpy.ndarray,
        stream: numpy.ndarray,
        whole: Form,
        last: Form,
    ) -> None:
        for form, _, (value, place, level, octets) in rows(last, whole, kept, places, levels, stream):
            string = numpy.unpackbits(octets, axis=1, bitorder="little")
            codes = _numbers(string[:, : form.kept * bits], bits, form.kept)
            value[...] = numpy.take_along_axis(level, (codes >> 1).astype(numpy.intp), axis=1)
            value.view(uint32)[...] |= (codes & uint16(1)).astype(uint32) << uint32(31)
            place[...] = places_of(string, bits, form)

    return Packing(pack, unpack)


def _means(sizes: numpy.ndarray, members: numpy.ndarray) -> numpy.ndarray:
    """The mean of the members of each row, summed by halves; 0 for a row without members."""
    halves = numpy.zeros((len(sizes), _power_of_two(sizes.shape[1])))
    numpy.copyto(halves[:, : sizes.shape[1]], sizes, where=members)
    half = halves.shape[1] // 2
    while half:
        halves[:, :half] += halves[:, half : 2 * half]
        half //= 2
    means: numpy.ndarray = halves[:, 0] / numpy.maximum(members.sum(axis=1), 1)
    return means


def _digits(numbers: numpy.ndarray, width: int) -> numpy.ndarray:
    """The lowest bits of each number, concatenated, by rows."""
    bits = numbers[:, :, None] >> numpy.arange(width, dtype=numbers.dtype) & numbers.dtype.type(1)
    digits: numpy.ndarray = bits.reshape(len(numbers), -1)
    return digits


def _numbers(string: numpy.ndarray, width: int, count: int) -> numpy.ndarray:
    """The reverse of `_digits`, as uint16."""
    digits = string.reshape(len(string), count, width).astype(uint16) << numpy.arange(width, dtype=uint16)
    numbers: numpy.ndarray = digits.sum(axis=2, dtype=uint16)
    return numbers


def places_of(string: numpy.ndarray, bits: int, form: Form) -> numpy.ndarray:
    """Return the places in rows of bits. Each row has a 1 for each place."""
    lower_at, upper_at = form.kept * bits, form.kept * (bits + form.low)
    ones = numpy.nonzero(string[:, upper_at:])[1].reshape(len(string), form.kept)
    upper = (ones - numpy.arange(form.kept)).astype(uint16) << uint16(form.low)
    places: numpy.ndarray = upper | _numbers(string[:, lower_at:upper_at], form.low, form.kept)
    return places


def _power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
