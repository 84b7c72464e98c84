"""The loops of fixed_point.py in NumPy, for machines without Numba: the same arguments, and the same bits.

Each operation goes through memory, so these take tens of times as long.
"""

from __future__ import annotations

import numpy
from numpy import float32, float64, int64, uint64

from mpitrain.allreduce.fixed_point import BLOCK_VALUES


def find_ranges(bits: numpy.ndarray, precision: int, ranges: numpy.ndarray) -> None:
    """See fixed_point.py."""
    fraction = precision - 1
    infinity = (255 if precision == 24 else 2047) << fraction
    rows = numpy.zeros(ranges.shape[1] * BLOCK_VALUES, bits.dtype)
    rows[: bits.size] = bits & bits.dtype.type(2 ** (8 * bits.itemsize - 1) - 1)
    rows = rows.reshape(-1, BLOCK_VALUES)
    largest = rows.max(axis=1)
    highest = numpy.where(rows < infinity, rows, 0).max(axis=1)
    smallest = (rows - bits.dtype.type(1)).min(axis=1) + bits.dtype.type(1)  # 0 becomes the largest of all
    some = highest > 0
    tops, bottoms = (numpy.maximum(one >> fraction, 1).astype(numpy.int16)[some] for one in (highest, smallest))
    ranges[0, some] = numpy.maximum(ranges[0, some], tops)
    ranges[1, some] = numpy.maximum(ranges[1, some], -bottoms)
    ranges[2, largest >= infinity] = 1


def write_limb(
    bits: numpy.ndarray, precision: int, bottoms: numpy.ndarray, offset: int, width: int, limb: numpy.ndarray, keep: int
) -> None:
    """See fixed_point.py."""
    fraction, sign = precision - 1, 31 if precision == 24 else 63
    most = 255 if precision == 24 else 2047
    x = bits.astype(uint64)
    exponents = (x >> uint64(fraction)).astype(int64) & most
    digits = x & uint64(2**fraction - 1) | (exponents > 0).astype(uint64) << uint64(fraction)
    digits[exponents == most] = 0
    shift = numpy.maximum(exponents, 1) - _by_value(bottoms, 0, bits.size) - offset
    left, right = (numpy.clip(one, 0, 63).astype(uint64) for one in (shift, -shift))
    values = (digits << left >> right & uint64(2**width - 1)).astype(int64)
    values[x >> uint64(sign) > 0] *= -1
    limb[:] = (limb & keep) + values


def round_words(words: numpy.ndarray, first: int, bottoms: numpy.ndarray, sums: numpy.ndarray) -> None:
    """See fixed_point.py."""
    with numpy.errstate(over="ignore"):
        sums[:] = numpy.ldexp(words.astype(float32).astype(float64), _by_value(bottoms, first, words.size) - 150)


def round_limbs(
    limbs: numpy.ndarray,
    first: int,
    bottoms: numpy.ndarray,
    width: int,
    precision: int,
    lowest: int,
    infinity: int,
    bits: numpy.ndarray,
) -> None:
    """See fixed_point.py."""
    digits, negative = _digits(limbs, width)
    value, place = numpy.zeros(bits.size, uint64), numpy.zeros(bits.size, int64)
    for k in range(len(digits) - 1, -1, -1):
        begun = value > 0
        taken = numpy.where(begun, numpy.minimum(62 - _highest_bits(value), width), 0)
        cut = (width - taken).astype(uint64)
        rest = digits[k] & ((uint64(1) << cut) - uint64(1))
        more = (value << taken.astype(uint64)) | digits[k] >> cut | (rest > 0).astype(uint64)
        value = numpy.where(begun, more, digits[k])
        place = numpy.where(begun, place - taken, k * width)
    unit = _by_value(bottoms, first, bits.size) + place
    exponents = numpy.maximum(unit + _highest_bits(value) - (precision - 1), lowest)
    right, left = (numpy.clip(one, 0, 63).astype(uint64) for one in (exponents - unit, unit - exponents))
    rest, half = value & ((uint64(1) << right) - uint64(1)), uint64(1) << (numpy.maximum(right, uint64(1)) - uint64(1))
    value = value << left >> right
    value += ((rest > half) | ((rest == half) & (value & uint64(1) > 0) & (right > 0))).astype(uint64)
    carried = (value >> uint64(precision)) > 0
    value >>= carried.astype(uint64)
    exponents += carried
    fields = numpy.where(value >> uint64(precision - 1) > 0, exponents - lowest + 1, 0)
    value &= uint64(2 ** (precision - 1) - 1)
    value[fields >= infinity] = 0
    fields = numpy.minimum(fields, infinity).astype(uint64)
    sign = negative.astype(uint64) << uint64(8 * bits.itemsize - 1)
    bits[:] = sign | fields << uint64(precision - 1) | value


def add_two(left: numpy.ndarray, right: numpy.ndarray, sums: numpy.ndarray) -> None:
    """See fixed_point.py."""
    with numpy.errstate(all="ignore"):
        result = (left.astype(float64) + 0) + right
        sums[:] = result
    sums[numpy.isnan(result)] = numpy.nan


def add_doubles(values: numpy.ndarray, totals: numpy.ndarray, keep: bool, inexact: numpy.ndarray) -> None:
    """See fixed_point.py."""
    total = totals.copy() if keep else numpy.zeros(values.size)
    with numpy.errstate(all="ignore"):
        value = values.astype(float64)
        numpy.add(total, value, out=totals)
        added = totals - total
        inexact[0] |= ((total - (totals - added)) + (value - added) != 0).any()


def round_doubles(totals: numpy.ndarray, sums: numpy.ndarray) -> None:
    """See fixed_point.py."""
    with numpy.errstate(over="ignore"):
        sums[:] = totals


def _by_value(bottoms: numpy.ndarray, first: int, count: int) -> numpy.ndarray:
    return numpy.repeat(bottoms, BLOCK_VALUES)[first : first + count]


def _digits(limbs: numpy.ndarray, width: int) -> tuple[list[numpy.ndarray], numpy.ndarray]:
    """The absolute values in digits of `width` bits, the lowest first, and where they are negative."""
    mask, digits = int64(2**width - 1), []
    carry = numpy.zeros(limbs.shape[1], int64)
    for limb in limbs:
        carry += limb
        digits.append(carry & mask)
        carry >>= width
    negative = carry < 0
    borrow = numpy.ones(carry.size, numpy.bool_)
    for digit in digits:
        opposite = ((digit ^ mask) + borrow) & mask
        borrow &= opposite == 0
        digit[negative] = opposite[negative]
    top = numpy.where(negative, ~carry + borrow, carry)
    return [one.astype(uint64) for one in (*digits, top)], negative


def _highest_bits(values: numpy.ndarray) -> numpy.ndarray:
    places = numpy.maximum(numpy.frexp(values.astype(float64))[1].astype(int64) - 1, 0)
    highest: numpy.ndarray = places - ((values >> places.astype(uint64) == 0) & (values > 0))  # it may have rounded up
    return highest
