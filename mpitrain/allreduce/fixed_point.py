"""Floats as whole numbers on a common scale, for sums that no order changes. Loops for Numba.

Blocks of 256 values have a scale: `bottom`, the exponent of the lowest bit of any of their values, on any rank. Then
each value is a whole number of units 2^bottom, and sums of whole numbers are exact. A number that is too long for one
word of 64 bits is cut into limbs of `width` bits, all with the sign of the value; each limb is summed by itself:

    value           limb 1      limb 0      units, with a width of 4 bits
    2.5     40      2           8           of 2^-4
    -0.25   -4      0           -4
    sum     36      2           4           2 x 16 + 4 = 36: 2.25

For 2^s summands width = 63 - s, so no word can overflow. `round_limbs` puts the limbs together and rounds once, to the
nearest value, ties to even.

Exponents are those of the bits of a float, at least 1: the last bit of a float32 has the weight 2^(exponent - 150), of
a float64 2^(exponent - 1075). float16 and bfloat16 are widened to float32 first, which changes no value.

Source: a long accumulator, Kulisch, Computer Arithmetic and Validity, 2nd ed., de Gruyter 2013, cut to the exponents
that occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy
from numpy import float32, float64, int64, uint64

BLOCK_VALUES = 256
_NAN = float32(numpy.nan)


class FloatForm(NamedTuple):
    """How the values of a dtype are read and written.

    Attributes:
        source: the dtype of the values that are read: a float of 32 or 64 bits.
        precision: number of bits of a normal value that is written, the hidden one included.
        lowest: the exponent, in terms of the source, of the last bit of a subnormal value that is written.
        infinity: the bits of the exponent of infinity that is written.
    """

    source: numpy.dtype
    precision: int
    lowest: int
    infinity: int

    @property
    def source_precision(self) -> int:
        """The number of bits of a normal value that is read."""
        return 24 if self.source.itemsize == 4 else 53


_SINGLE, _DOUBLE = numpy.dtype(numpy.float32), numpy.dtype(numpy.float64)
FORMS = {
    numpy.dtype(numpy.float16): FloatForm(_SINGLE, 11, 126, 31),
    numpy.dtype(ml_dtypes.bfloat16): FloatForm(_SINGLE, 8, 17, 255),
    _SINGLE: FloatForm(_SINGLE, 24, 1, 255),
    _DOUBLE: FloatForm(_DOUBLE, 53, 1, 2047),
}


def highest_bit(value: uint64) -> int64:
    """Return the number of the highest bit of a number below 2^63; 0 for 0."""
    if value == uint64(0):
        return int64(0)
    place = (float64(value).view(int64) >> int64(52)) - int64(1023)
    return place - int64(value >> uint64(place) == uint64(0))  # the conversion may have rounded up


def find_ranges(bits: numpy.ndarray, precision: int, ranges: numpy.ndarray) -> None:
    """Raise the ranges of blocks to those of these values, given as bits.

    Args:
        bits: uint32[n] or uint64[n].
        precision: of the values.
        ranges: int16[3, blocks]: the highest exponent of a finite value that is not zero, the lowest one times -1, and
            1 if a value is infinite or NaN.
    """
    fraction = precision - 1
    most = 255 if precision == 24 else 2047
    infinity = uint64(most) << uint64(fraction)
    magnitude = uint64(0x7FFFFFFF) if precision == 24 else uint64(0x7FFFFFFFFFFFFFFF)
    for block in range(ranges.shape[1]):
        part = bits[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        largest, highest, smallest = uint64(0), uint64(0), uint64(0xFFFFFFFFFFFFFFFF)
        for i in range(part.size):
            size = uint64(part[i]) & magnitude
            largest = max(largest, size)
            highest = max(highest, size if size < infinity else uint64(0))
            smallest = min(smallest, uint64(size - uint64(1)))  # 0 becomes the largest of all
        if highest > uint64(0):
            top = max(int64(highest >> uint64(fraction)), int64(1))
            bottom = max(int64((smallest + uint64(1)) >> uint64(fraction)), int64(1))
            ranges[0, block] = max(int64(ranges[0, block]), top)
            ranges[1, block] = max(int64(ranges[1, block]), -bottom)
        if largest >= infinity:
            ranges[2, block] = 1


def write_limb(
    bits: numpy.ndarray, precision: int, bottoms: numpy.ndarray, offset: int, width: int, limb: numpy.ndarray, keep: int
) -> None:
    """Write, or add, one limb of each value. Infinity and NaN count as 0.

    Args:
        bits: uint32[n] or uint64[n].
        precision: of the values.
        bottoms: int64[blocks].
        offset: number of the lowest bit of the limb.
        width: of the limb, in bits.
        limb: int64[n].
        keep: -1 to add, 0 to overwrite.
    """
    fraction, sign = precision - 1, 31 if precision == 24 else 63
    most = int64(255) if precision == 24 else int64(2047)
    mask = (uint64(1) << uint64(width)) - uint64(1)
    below = (uint64(1) << uint64(fraction)) - uint64(1)
    for block in range(bottoms.size):
        part = bits[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        into = limb[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        bottom = bottoms[block] + offset
        for i in range(part.size):
            x = uint64(part[i])
            exponent = int64(x >> uint64(fraction)) & most
            digits = x & below
            digits |= uint64(exponent > 0) << uint64(fraction)
            digits = uint64(0) if exponent == most else digits
            shift = max(exponent, int64(1)) - bottom
            left = uint64(min(max(shift, int64(0)), int64(63)))
            right = uint64(min(max(-shift, int64(0)), int64(63)))
            value = int64(((digits << left) >> right) & mask)
            negative = -int64(x >> uint64(sign))
            into[i] = (into[i] & keep) + ((value ^ negative) - negative)


def round_words(words: numpy.ndarray, first: int, bottoms: numpy.ndarray, sums: numpy.ndarray) -> None:
    """Do the same as round_limbs for one limb and float32, several times as fast.

    The processor rounds a whole number to 24 bits. The scale then changes only the exponent: a sum below the normal
    numbers is a multiple of the smallest number, as all summands are, so it has at most 23 bits.

    Args:
        words: int64[n].
        first: number of the first value in the blocks.
        bottoms: int64[blocks].
        sums: float32[n]; overwritten.
    """
    begin = 0
    for block in range(int64(first) // BLOCK_VALUES, bottoms.size):
        end = min((block + 1) * BLOCK_VALUES - first, sums.size)
        scale = int64((bottoms[block] - int64(150) + int64(1023)) << int64(52)).view(float64)
        part, into = words[begin:end], sums[begin:end]
        for i in range(into.size):
            into[i] = float32(float64(float32(part[i])) * scale)
        begin = end


def round_limbs(
    highest_bit: Callable[[uint64], int64],
    limbs: numpy.ndarray,
    first: int,
    bottoms: numpy.ndarray,
    width: int,
    precision: int,
    lowest: int,
    infinity: int,
    bits: numpy.ndarray,
) -> None:
    """Overwrite `bits` by the nearest floats; see FloatForm. Zero is +0.

    Args:
        highest_bit: the function of that name, compiled.
        limbs: int64[number, n]: sums of limbs, the lowest first.
        first: number of the first value in the blocks.
        bottoms: int64[blocks].
        width: of the limbs, in bits.
        bits: uint16[n], uint32[n] or uint64[n].
    """
    number = limbs.shape[0]
    digits = numpy.empty(number + 1, numpy.uint64)
    mask = (int64(1) << int64(width)) - int64(1)
    fraction = uint64(precision - 1)
    sign_place = uint64(precision - 1) + uint64(5 if infinity == 31 else 8 if infinity == 255 else 11)
    for i in range(bits.size):
        bottom = bottoms[(first + i) // BLOCK_VALUES]
        negative, place = uint64(0), int64(0)
        if number == 1:
            word = limbs[0, i]
            if word < 0:
                negative, word = uint64(1), -word
            value = uint64(word)
        else:
            carry = int64(0)
            for k in range(number):
                carry += limbs[k, i]
                digits[k] = uint64(carry & mask)
                carry >>= int64(width)
            if carry < 0:  # two's complement of all digits
                negative = uint64(1)
                borrow = uint64(1)
                for k in range(number):
                    digits[k] = ((digits[k] ^ uint64(mask)) + borrow) & uint64(mask)
                    borrow = uint64(1) if borrow and digits[k] == uint64(0) else uint64(0)
                carry = ~carry + int64(borrow)
            digits[number] = uint64(carry)
            k = number
            while k > 0 and digits[k] == uint64(0):
                k -= 1
            value, place = uint64(digits[k]), int64(k * width)
            highest = highest_bit(value)
            # 63 bits, the last of which tells whether any further bit is set.
            while k > 0:
                k -= 1
                taken = min(int64(62) - highest, int64(width))
                value = (value << uint64(taken)) | (digits[k] >> uint64(width - taken))
                highest += taken
                place -= taken
                if digits[k] & ((uint64(1) << uint64(width - taken)) - uint64(1)):
                    value |= uint64(1)
        if value == uint64(0):
            bits[i] = 0
            continue
        exponent = max(bottom + place + highest_bit(value) - (precision - 1), int64(lowest))
        shift = exponent - (bottom + place)
        if shift > 0:
            rest = value & ((uint64(1) << uint64(shift)) - uint64(1))
            half = uint64(1) << uint64(shift - 1)
            value >>= uint64(shift)
            if rest > half or (rest == half and value & uint64(1)):
                value += uint64(1)
        else:
            value <<= uint64(-shift)
        if value >> uint64(precision):
            value >>= uint64(1)
            exponent += 1
        field = uint64(exponent - lowest + 1) if value >> fraction else uint64(0)
        value &= (uint64(1) << fraction) - uint64(1)
        if field >= uint64(infinity):
            field, value = uint64(infinity), uint64(0)
        bits[i] = (negative << sign_place) | (field << fraction) | value


def add_two(left: numpy.ndarray, right: numpy.ndarray, sums: numpy.ndarray) -> None:
    """Overwrite `sums`, which may be one of the summands, with left + right, rounded once. All are float32[n].

    The addition in float64 may round as well, but never changes what the second rounding gives: Figueroa, When is
    double rounding innocuous?, ACM SIGNUM Newsletter 30 (1995) 21-26.
    """
    for i in range(sums.size):
        result = (float64(left[i]) + float64(0)) + float64(right[i])  # -0 + 0 is +0
        sums[i] = float32(result) if result == result else _NAN


def add_doubles(values: numpy.ndarray, totals: numpy.ndarray, keep: bool, inexact: numpy.ndarray) -> None:
    """Add float32 values in float64, and report whether an addition was inexact: then the totals are invalid.

    The error of each addition is computed by the six operations of Knuth's TwoSum.

    Args:
        values: float32[n].
        totals: float64[n].
        keep: False to overwrite.
        inexact: bool[1]; set if an addition was inexact or its result not finite.
    """
    wrong = False
    for i in range(values.size):
        value, total = float64(values[i]), totals[i] if keep else float64(0)
        result = total + value
        added = result - total
        error = (total - (result - added)) + (value - added)
        wrong |= error != float64(0)
        totals[i] = result
    inexact[0] |= wrong


def round_doubles(totals: numpy.ndarray, sums: numpy.ndarray) -> None:
    """Overwrite float32[n] by float64[n], rounded once."""
    for i in range(totals.size):
        sums[i] = float32(totals[i])
