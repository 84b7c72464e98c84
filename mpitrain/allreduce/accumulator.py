"""Exact sums on one rank, and the steps of a sum over ranks: ranges, scales, words, rounding (see fixed_point.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy

from mpitrain.allreduce import fixed_point, fixed_point_numpy
from mpitrain.allreduce.fixed_point import BLOCK_VALUES, FORMS, FloatForm
from mpitrain.compression.kernels import can_compile, compiled

_PIECE_VALUES = 2**14  # summed at a time: 128 KiB of float64 stay in a core's cache
_COUNT_BITS = 20  # of each of the three counts in a word: +infinity, -infinity, NaN
MOST_SUMMANDS = 2**_COUNT_BITS - 1
_NO_EXPONENT = numpy.iinfo(numpy.int16).min


class Scale(NamedTuple):
    """The common scale of some blocks.

    Attributes:
        bottoms: int64[blocks]: exponents of the units.
        width: of a limb, in bits.
        limbs: int64[blocks]: the number of limbs of each block, at least 1.
        special: bool[blocks]: whether there is infinity or NaN.
    """

    bottoms: numpy.ndarray
    width: int
    limbs: numpy.ndarray
    special: numpy.ndarray

    def of(self, blocks: slice | numpy.ndarray) -> Scale:
        """The scale of some of the blocks."""
        return Scale(self.bottoms[blocks], self.width, self.limbs[blocks], self.special[blocks])

    @property
    def num_limbs(self) -> int:
        """The number of limbs of the block that needs the most."""
        return int(self.limbs.max())

    @property
    def num_words(self) -> int:
        """The number of words that are summed for each value: limbs, and a word of counts if there are infinities or
        NaNs."""
        return self.num_limbs + bool(self.special.any())


def no_ranges(count: int) -> numpy.ndarray:
    """The initial ranges for this many values: int16[3, blocks], to be raised."""
    ranges = numpy.zeros((3, -(-count // BLOCK_VALUES)), numpy.int16)
    ranges[1] = _NO_EXPONENT
    return ranges


def scale_of(form: FloatForm, ranges: numpy.ndarray, num_summands: int) -> Scale:
    """The scale for all summands, at most `num_summands`, from the maxima of their ranges."""
    width = 63 - (num_summands - 1).bit_length()
    tops, bottoms, special = ranges.astype(numpy.int64)
    bottoms = numpy.where(tops > 0, -bottoms, 1)  # with zeros alone, any value
    limbs = -(-(tops - bottoms + form.source_precision) // width)
    return Scale(bottoms, width, numpy.maximum(limbs, 1), special > 0)


def bits_of(form: FloatForm, values: numpy.ndarray) -> numpy.ndarray:
    """The bits of values in the source's dtype."""
    with numpy.errstate(invalid="ignore"):  # of a signalling NaN
        return values.astype(form.source, copy=False).view(f"u{form.source.itemsize}")


class Accumulator:
    """The loops, and their scratch memory: an object serves one caller at a time."""

    def __init__(self, *, compiles: bool | None = None) -> None:
        """`compiles`: whether Numba compiles the loops. Default: if it is installed. NumPy gives the same bits."""
        self.compiles = can_compile() if compiles is None else compiles
        names = ("find_ranges", "write_limb", "round_words", "round_limbs", "add_two", "add_doubles", "round_doubles")
        module = fixed_point if self.compiles else fixed_point_numpy
        loops = [getattr(module, name) for name in names]
        if self.compiles:
            loops = [compiled(loop) for loop in loops]
            loops[3] = partial(loops[3], compiled(fixed_point.highest_bit))
        self._find_ranges, self._write_limb, self._round_words, self._round_limbs, *rest = loops
        self._add_two, self._add_doubles, self._round_doubles = rest
        self._doubles = numpy.empty(_PIECE_VALUES, numpy.float64)

    def compile(self, dtype: numpy.dtype) -> None:
        """Compile all loops for a dtype of FORMS. In the middle of a training step, this would delay every rank."""
        values = numpy.array([1, 2.0**-100]).astype(dtype)  # in float32, they need two words together
        for number in (2, 3):
            self.add_up([values] * number, values)
        for some in (values, values[:1]):
            self._add_slowly([some, some], some)

    def raise_ranges(self, form: FloatForm, bits: numpy.ndarray, ranges: numpy.ndarray) -> None:
        """Raise `ranges`, of no_ranges, to those of a summand."""
        self._find_ranges(bits, form.source_precision, ranges)

    def write_word(
        self, form: FloatForm, summands: Sequence[numpy.ndarray], scale: Scale, word: int, into: numpy.ndarray
    ) -> None:
        """Overwrite `into`, int64[n], with the sum of one word of all summands, given as bits; without summands, with
        zeros."""
        if not summands:
            into.fill(0)
        for number, bits in enumerate(summands):
            if word < scale.num_limbs:
                offset, keep = word * scale.width, -min(number, 1)
                self._write_limb(bits, form.source_precision, scale.bottoms, offset, scale.width, into, keep)
            elif number:
                into += _counted(form, bits)
            else:
                into[:] = _counted(form, bits)

    def round(self, form: FloatForm, words: numpy.ndarray, first: int, scale: Scale, sums: numpy.ndarray) -> None:
        """Overwrite `sums` with the nearest values.

        Args:
            words: int64[scale.num_words, n]: the sums over all summands.
            first: number of the first value in the blocks of the scale.
            sums: n values.
        """
        limbs = words[: scale.num_limbs]
        if len(limbs) == 1 and sums.dtype == numpy.float32:
            self._round_words(limbs[0], first, scale.bottoms, sums)
        else:
            bits = sums.view(f"u{sums.itemsize}")
            self._round_limbs(
                limbs, first, scale.bottoms, scale.width, form.precision, form.lowest, form.infinity, bits
            )
        if len(words) > len(limbs):
            _put_special(words[-1], sums)

    def add_up(self, summands: Sequence[numpy.ndarray], into: numpy.ndarray) -> None:
        """Overwrite `into`, which may be one of the summands, with their sum, rounded once."""
        if len(summands) == 1:
            with numpy.errstate(invalid="ignore"):
                numpy.add(summands[0], into.dtype.type(0), out=into)  # -0 + 0 is +0
                into[into != into] = numpy.nan
            return
        if len(summands) == 2 and into.dtype == numpy.float32:
            self._add_two(*summands, into)
            return
        for begin in range(0, into.size, _PIECE_VALUES):
            piece = slice(begin, begin + _PIECE_VALUES)
            parts = [summand[piece] for summand in summands]
            if into.dtype != numpy.float32 or not self._add_quickly(parts, into[piece]):
                self._add_slowly(parts, into[piece])

    def _add_quickly(self, summands: Sequence[numpy.ndarray], into: numpy.ndarray) -> bool:
        """Add up float32 in float64. False, and nothing is changed, if that is inexact."""
        totals, inexact = self._doubles[: into.size], numpy.zeros(1, numpy.bool_)
        for number, summand in enumerate(summands):
            self._add_doubles(summand, totals, number > 0, inexact)
        if inexact[0]:
            return False
        self._round_doubles(totals, into)
        return True

    def _add_slowly(self, summands: Sequence[numpy.ndarray], into: numpy.ndarray) -> None:
        form, ranges = FORMS[into.dtype], no_ranges(into.size)
        all_bits = [bits_of(form, summand) for summand in summands]
        for bits in all_bits:
            self.raise_ranges(form, bits, ranges)
        scale = scale_of(form, ranges, len(summands))
        words = numpy.empty((scale.num_words, into.size), numpy.int64)
        for word in range(len(words)):
            self.write_word(form, all_bits, scale, word, words[word])
        self.round(form, words, 0, scale, into)


def _counted(form: FloatForm, bits: numpy.ndarray) -> numpy.ndarray:
    """A word for each value; the sum of such words counts infinities and NaNs."""
    values = bits.view(form.source)
    nan = numpy.isnan(values)
    places = numpy.where(nan, 2 * _COUNT_BITS, numpy.where(numpy.signbit(values), _COUNT_BITS, 0))
    counted: numpy.ndarray = (nan | numpy.isinf(values)).astype(numpy.int64) << places
    return counted


def _put_special(counts: numpy.ndarray, sums: numpy.ndarray) -> None:
    """Overwrite the sums that are not finite by what was counted."""
    mask = 2**_COUNT_BITS - 1
    positive, negative = counts & mask > 0, counts >> _COUNT_BITS & mask > 0
    sums[positive] = numpy.inf
    sums[negative] = -numpy.inf
    sums[(positive & negative) | (counts >> 2 * _COUNT_BITS > 0)] = numpy.nan
