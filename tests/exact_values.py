"""Values that are hard to sum, and their correctly rounded sums by whole numbers of any length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import ml_dtypes
import numpy

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
# The number of bits of a value; the exponents of the smallest value above 0 and of the first one that is too large.
LIMITS = {
    "float16": (11, -24, 16),
    "bfloat16": (8, -133, 128),
    "float32": (24, -149, 128),
    "float64": (53, -1074, 1024),
}
_NANS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}


def hard_values(dtype: numpy.dtype, count: int, number: int, seed: int = 0) -> numpy.ndarray:
    """Summand `number` of so many values. The kinds of values lie one after the other, 17 of each at a time."""
    rng = numpy.random.default_rng((seed, number, count))
    _, smallest, largest = LIMITS[str(dtype)]
    normal = rng.standard_normal(count)
    kinds = [
        normal,
        numpy.ldexp(normal, rng.integers(smallest, largest - 4, count)),  # any exponent
        numpy.ldexp(normal, rng.integers(smallest, smallest + 12, count)),  # subnormal
        numpy.ldexp(normal, largest - 3),  # sums may overflow
        numpy.where(rng.random(count) < 0.3, normal, -0.0),
        # Of two summands, one cancels the other but for the last bit.
        (-1) ** number * numpy.random.default_rng((seed, number // 2)).standard_normal(count) * (1 + number % 2 / 512),
        numpy.ldexp(rng.integers(-3, 4, count), rng.integers(smallest, smallest + 3, count)),
        # Halfway between two values, and a little more or less.
        numpy.where(number % 3 == 0, 1.0, numpy.ldexp(rng.integers(-1, 2, count), (-11, -24, -53)[number % 3])),
        numpy.where(rng.random(count) < 0.02, rng.choice([numpy.inf, -numpy.inf, numpy.nan], count), normal),
    ]
    chosen = numpy.choose(numpy.arange(count) // 17 % len(kinds), kinds)
    with numpy.errstate(all="ignore"):
        values: numpy.ndarray = chosen.astype(dtype)
    # What the conversion has made infinite is no infinity that was meant.
    overflown = ~numpy.isfinite(values) & numpy.isfinite(chosen)
    values[overflown] = 1
    bits = values.view(f"u{values.itemsize}")
    # Some NaNs become signalling ones: the highest bit of the fraction is 0, and the lowest is 1.
    quiet = LIMITS[str(dtype)][0] - 2
    signalling = numpy.isnan(values) & (numpy.arange(count) % 2 == 0)
    bits[signalling] = bits[signalling] & ~(bits.dtype.type(1) << bits.dtype.type(quiet)) | bits.dtype.type(1)
    return values


def exact_sums(summands: Sequence[numpy.ndarray]) -> numpy.ndarray:
    """The correctly rounded sums, as bits. Each is made as a fraction, so in no order and without rounding."""
    dtype = summands[0].dtype
    sums = [_nearest([float(value) for value in column], dtype) for column in zip(*summands, strict=True)]
    bits = numpy.array(sums).astype(dtype).view(f"u{dtype.itemsize}")
    bits[numpy.isnan(sums)] = _NANS[str(dtype)]
    return bits


def _nearest(values: Sequence[float], dtype: numpy.dtype) -> float:
    if not all(map(math.isfinite, values)):
        infinities = {value for value in values if not math.isfinite(value) and not math.isnan(value)}
        return infinities.pop() if len(infinities) == 1 and not any(map(math.isnan, values)) else math.nan
    precision, smallest, largest = LIMITS[str(dtype)]
    total = sum(map(Fraction, values))
    if total == 0:
        return 0.0
    size = abs(total)
    highest = size.numerator.bit_length() - size.denominator.bit_length()
    highest -= Fraction(2) ** highest > size
    unit = Fraction(2) ** max(highest - precision + 1, smallest)
    rounded = round(size / unit) * unit  # to nearest, ties to even
    absolute = math.inf if rounded >= 2**largest else float(rounded)
    return absolute if total > 0 else -absolute
