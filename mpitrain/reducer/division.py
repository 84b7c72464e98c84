"""The division of parameters between servers: each server has a range of the flat buffer of each dtype.

    flat buffer   |  a  |        b        |c|  d  |
    server              0        |       1        |        evenly: the boundary may lie within a parameter

    flat buffer   |        b        |  a  |  d  |c|
    server                 0        |      1      |        whole: the parameters of a server are neighbours

Every value of a dense model is pulled and pushed the same number of times, so ranges of equal size balance memory and
traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy

from mpitrain.reducer.bucket import Layout, Parameter, plan_layout
from mpitrain.shown import shown_bytes, shown_name
from mpitrain.world.shard import part_of

# By the dtype of the flat buffer, in elements.
Part: TypeAlias = Mapping[numpy.dtype, slice]


@dataclass(frozen=True)
class PartSize:
    """The size of a server's part.

    Attributes:
        num_bytes: of all its values.
        num_whole: tensors that it has alone.
        num_cut: tensors that have values in another part too.
        largest: the tensor with the most bytes in it; "": there is none.
        largest_bytes: of this tensor, in this part.
    """

    num_bytes: int
    num_whole: int
    num_cut: int
    largest: str
    largest_bytes: int

    def line(self) -> str:
        """Describe the size in one line."""
        tensors = f"whole tensors: {self.num_whole:,}, in part: {self.num_cut:,}"
        text = f"{shown_bytes(self.num_bytes)} of parameters; {tensors}"
        if not self.largest:
            return text
        return f"{text}, the largest: {shown_name(self.largest)} with {shown_bytes(self.largest_bytes)}"


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


def sizes_of(division: Division) -> list[PartSize]:
    """Return the size of each server's part."""
    sizes = []
    for part in division.parts:
        pieces = [(division.layout.parameters[index], own) for index, own, _ in members(division.layout, part)]
        cut = sum(own.stop - own.start < parameter.count for parameter, own in pieces)
        num_bytes = [(own.stop - own.start) * parameter.dtype.itemsize for parameter, own in pieces]
        most = max(num_bytes, default=0)
        largest = pieces[num_bytes.index(most)][0].name if pieces else ""
        sizes.append(PartSize(sum(num_bytes), len(pieces) - cut, cut, largest, most))
    return sizes


def line_of(division: Division, names: Sequence[str]) -> str:
    """Describe in one line how much each server has. `names` are the servers' names."""
    sizes = [size.num_bytes for size in sizes_of(division)]
    shares = [f"{name}: {shown_bytes(size)}" for name, size in zip(names, sizes, strict=True)]
    return f"{', '.join(shares)} of {shown_bytes(sum(sizes))} of parameters"


def _bytes_of(parameter: Parameter) -> int:
    return parameter.count * parameter.dtype.itemsize
