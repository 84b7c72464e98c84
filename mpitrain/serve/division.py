"""How parameters are divided between servers: each server has a range of the flat buffer of each dtype.

    flat buffer   |  a  |        b        |c|  d  |
    server              0        |       1        |        the boundary may lie within a parameter

Every value of a dense model is pulled and pushed equally often, so ranges of equal size balance bytes and traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy

from mpitrain.exchange.bucket import Layout
from mpitrain.shard import part_of

# By the dtype of the flat buffer, in elements.
Part: TypeAlias = Mapping[numpy.dtype, slice]


def divide(layout: Layout, num_servers: int) -> list[Part]:
    """Return the part of each server. Sizes differ by one element of each dtype at most."""
    return [
        {dtype: part_of(count, number, num_servers) for dtype, count in layout.counts.items()}
        for number in range(num_servers)
    ]


def members(layout: Layout, part: Part) -> Iterator[tuple[int, slice, slice]]:
    """Yield the parameters that have elements in a part: index, and the range in the parameter and in the part."""
    for index, (parameter, (begin, end)) in enumerate(zip(layout.parameters, layout.places, strict=True)):
        own = part[parameter.dtype]
        first, last = max(begin, own.start), min(end, own.stop)
        if first < last:
            yield index, slice(first - begin, last - begin), slice(first - own.start, last - own.start)


def counts_of(part: Part) -> dict[numpy.dtype, int]:
    """Return the number of elements of a part, by dtype."""
    return {dtype: own.stop - own.start for dtype, own in part.items()}


def line_of(layout: Layout, parts: list[Part], names: list[str]) -> str:
    """Return who has how much, in a line. `names` are those of the servers."""
    sizes = [_bytes(counts_of(part)) for part in parts]
    shares = [f"{name}: {size / 2**20:,.2f} MiB" for name, size in zip(names, sizes, strict=True)]
    return f"{', '.join(shares)} of {_bytes(layout.counts) / 2**20:,.2f} MiB of parameters"


def _bytes(counts: Mapping[numpy.dtype, int]) -> int:
    return sum(count * dtype.itemsize for dtype, count in counts.items())
