"""How parameters are divided between servers: each server has a range of the flat buffer of each dtype.

    flat buffer   |  a  |        b        |c|  d  |
    server              0        |       1        |        evenly: the boundary may lie within a parameter

    flat buffer   |        b        |  a  |  d  |c|
    server                 0        |      1      |        whole: the parameters of a server are neighbours

Every value of a dense model is pulled and pushed equally often, so ranges of equal size balance bytes and traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy

from mpitrain.exchange.bucket import Layout, Parameter, plan_layout
from mpitrain.shard import part_of

# By the dtype of the flat buffer, in elements.
Part: TypeAlias = Mapping[numpy.dtype, slice]


@dataclass(frozen=True)
class Division:
    """Parameters with a place for each, and the part of each server."""

    layout: Layout
    parts: list[Part]


def divide(layout: Layout, num_servers: int) -> Division:
    """Divide flat buffers evenly. Sizes differ by one element of each dtype at most."""
    parts: list[Part] = [
        {dtype: part_of(count, number, num_servers) for dtype, count in layout.counts.items()}
        for number in range(num_servers)
    ]
    return Division(layout, parts)


def divide_whole(parameters: Sequence[Parameter], owners: Mapping[str, int], num_servers: int) -> Division:
    """Give each parameter to one server. `owners` are the servers' numbers by parameter name."""
    ends = dict.fromkeys(plan_layout(parameters).counts, 0)
    places: dict[str, tuple[int, int]] = {}
    parts: list[Part] = []
    for number in range(num_servers):
        begins = dict(ends)
        for parameter in (one for one in parameters if owners[one.name] == number):
            begin = ends[parameter.dtype]
            ends[parameter.dtype] = begin + parameter.count
            places[parameter.name] = begin, begin + parameter.count
        parts.append({dtype: slice(begins[dtype], end) for dtype, end in ends.items()})
    layout = Layout(tuple(parameters), tuple(places[parameter.name] for parameter in parameters), ends)
    return Division(layout, parts)


def owners_of(parameters: Sequence[Parameter], num_servers: int) -> dict[str, int]:
    """Return a server for each parameter: the largest one first, to the server with the fewest bytes so far."""
    loads = [0] * num_servers
    owners: dict[str, int] = {}
    for parameter in sorted(parameters, key=_bytes_of, reverse=True):
        owners[parameter.name] = number = loads.index(min(loads))
        loads[number] += _bytes_of(parameter)
    return owners


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


def line_of(division: Division, names: Sequence[str]) -> str:
    """Return who has how much, in a line. `names` are those of the servers."""
    sizes = [_bytes(counts_of(part)) for part in division.parts]
    shares = [f"{name}: {size / 2**20:,.2f} MiB" for name, size in zip(names, sizes, strict=True)]
    return f"{', '.join(shares)} of {sum(sizes) / 2**20:,.2f} MiB of parameters"


def _bytes(counts: Mapping[numpy.dtype, int]) -> int:
    return sum(count * dtype.itemsize for dtype, count in counts.items())


def _bytes_of(parameter: Parameter) -> int:
    return parameter.count * parameter.dtype.itemsize
