"""Ranges of a flat buffer that a rank owns. The test needs no ranks."""

from __future__ import annotations

import numpy

from mpitrain.optim.owned import cut, put, rest_of, size_of, within


def test_ranges() -> None:
    """`cut` and `put` are each other's reverse, and `within` finds a place in both."""
    whole = numpy.arange(20)
    ranges = [slice(2, 5), slice(7, 7), slice(9, 14)]
    part = cut(ranges, whole)
    assert part.tolist() == [2, 3, 4, 9, 10, 11, 12, 13]
    assert size_of(ranges) == 8
    assert sorted([*part, *cut(rest_of(ranges, 20), whole)]) == list(range(20))
    assert rest_of([], 3) == [slice(0, 3)]
    assert rest_of([slice(0, 3)], 3) == []
    back = numpy.full(20, -1)
    put(ranges, part, back)
    assert [place for place in range(20) if back[place] == place] == part.tolist()
    for begin in range(20):
        for end in range(begin, 20):
            got = [whole[slice(begin, end)][there].tolist() for there, _ in within(ranges, slice(begin, end))]
            mine = [part[here].tolist() for _, here in within(ranges, slice(begin, end))]
            assert got == mine
            assert [value for one in got for value in one] == [value for value in part.tolist() if begin <= value < end]
