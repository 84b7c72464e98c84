"""The part of each flat buffer that one rank owns if the ranks divide the optimizer: a range in every bucket.

    flat buffer   |   bucket 2   |   bucket 1   |  bucket 0  |
    rank          | 0  | 1  | 2  | 0  | 1  | 2  | 0 | 1 | 2  |
    rank 1's part       | b |          | e |          | h |       ─cut─>   |b e h|

A part is an array of its own: the ranges one after the other, in the order of the flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy

from mpitrain.arrays import Array, namespace
from mpitrain.reducer.bucket import Bucket, Layout

# By the dtype of the flat buffer: ranges in elements, in ascending order. A dtype may have none.
Owned: TypeAlias = Mapping[numpy.dtype, Sequence[slice]]


def owned_by(layout: Layout, buckets: Sequence[Bucket], own: Callable[[int, int], slice], rank: int) -> Owned:
    """Return the ranges of a rank; `own(count, rank)` is its part of a bucket of `count` elements."""
    owned: dict[numpy.dtype, list[slice]] = {dtype: [] for dtype in layout.counts}
    for bucket in sorted(buckets, key=lambda bucket: bucket.begin):
        part = own(bucket.end - bucket.begin, rank)
        if part.stop > part.start:
            owned[bucket.dtype].append(slice(bucket.begin + part.start, bucket.begin + part.stop))
    return owned


def cut(ranges: Sequence[slice], flat: Array) -> Array:
    """Return the part of a flat buffer: a new array."""
    part: Array = namespace(flat).concatenate([flat[:0], *(flat[one] for one in ranges)])
    return part


def put(ranges: Sequence[slice], part: Array, flat: Array) -> None:
    """Copy a part to its places in a flat buffer. The reverse of `cut`."""
    begin = 0
    for one in ranges:
        end = begin + one.stop - one.start
        flat[one] = part[begin:end]
        begin = end


def rest_of(ranges: Sequence[slice], count: int) -> list[slice]:
    """Return the ranges between those of a part, in a flat buffer of `count` elements."""
    begins = [0, *(one.stop for one in ranges)]
    ends = [*(one.start for one in ranges), count]
    return [slice(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def size_of(ranges: Sequence[slice]) -> int:
    """Return the number of elements of a part."""
    return sum(one.stop - one.start for one in ranges)


def within(ranges: Sequence[slice], place: slice) -> Iterator[tuple[slice, slice]]:
    """Yield the overlaps of a part with a range `place` of the flat buffer: each as a range in `place`, and one in the
    part."""
    begin = 0
    for one in ranges:
        first, last = max(one.start, place.start), min(one.stop, place.stop)
        if first < last:
            there = begin + first - one.start
            yield slice(first - place.start, last - place.start), slice(there, there + last - first)
        begin += one.stop - one.start
