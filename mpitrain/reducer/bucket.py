"""The place of each gradient in a flat buffer, and the parts of a buffer that travel together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError


@dataclass(frozen=True)
class Parameter:
    """Name, shape and dtype of one parameter, and so of its gradient.

    Attributes:
        name: unique in the model, and the same on every rank.
        shape: without a dimension for ranks: every rank has the whole parameter.
        dtype: float16, bfloat16, float32 or float64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: numpy.dtype

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.shape}"


@dataclass(frozen=True)
class Bucket:
    """A group of gradients that are exchanged together.

    Attributes:
        members: the indices of the bucket's parameters, neighbours in parameter order.
        dtype: the dtype of all these parameters.
        begin, end: the place of the bucket in the flat buffer of that dtype, in elements.
    """

    members: tuple[int, ...]
    dtype: numpy.dtype
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The place of every parameter. Each dtype has one flat buffer, with its parameters in order and without gaps.

    Attributes:
        parameters: the parameters, as given.
        places: begin and end of each parameter in the flat buffer of its dtype, in elements.
        counts: number of elements of the flat buffer of each dtype.
    """

    parameters: tuple[Parameter, ...]
    places: tuple[tuple[int, int], ...]
    counts: dict[numpy.dtype, int]

    def tensors(self, dtype: numpy.dtype) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of the parameters in the flat buffer of a dtype, in order."""
        return [(parameter.name, parameter.shape) for parameter in self.parameters if parameter.dtype == dtype]

    def views(self, flats: dict[numpy.dtype, Array]) -> list[Array]:
        """Return the parameters as arrays of their shapes, which share the memory of the flat buffers."""
        return [
            flats[parameter.dtype][begin:end].reshape(parameter.shape)
            for parameter, (begin, end) in zip(self.parameters, self.places, strict=True)
        ]

    def named(self, flats: dict[numpy.dtype, Array]) -> dict[str, Array]:
        """Return the same arrays by the names of the parameters."""
        return {parameter.name: view for parameter, view in zip(self.parameters, self.views(flats), strict=True)}

    def flats_of(self, values: Mapping[str, numpy.ndarray]) -> dict[numpy.dtype, numpy.ndarray]:
        """Make flat buffers with these values, given by the names of the parameters. The reverse of `named`; {} for {}.

        Raises:
            CheckpointError: the values belong to other parameters.
        """
        if not values:
            return {}
        expected = {parameter.name: parameter.shape for parameter in self.parameters}
        shapes = {name: value.shape for name, value in values.items()}
        for name in [*expected, *shapes]:
            if shapes.get(name) != expected.get(name):
                raise CheckpointError(
                    f"the values left to send have shape {shapes.get(name)} for {name}, those of the model "
                    f"{expected.get(name)}; is it a checkpoint of this model?"
                )
        flats = {dtype: numpy.empty(count, dtype) for dtype, count in self.counts.items()}
        for name, view in self.named(flats).items():
            view[...] = values[name]
        return flats


def plan_layout(parameters: Sequence[Parameter]) -> Layout:
    """Make the layout of these parameters."""
    counts: dict[numpy.dtype, int] = {}
    places = []
    for parameter in parameters:
        begin = counts.get(parameter.dtype, 0)
        counts[parameter.dtype] = begin + parameter.count
        places.append((begin, begin + parameter.count))
    return Layout(tuple(parameters), tuple(places), counts)


def plan_buckets(layout: Layout, bucket_bytes: int) -> list[Bucket]:
    """Cut the layout into buckets, in the order in which they are sent: from the last parameter to the first.

    A backward pass ends with the first layer, so the gradients of the last layers are ready first. A bucket is complete
    once it holds `bucket_bytes`. A larger parameter makes its bucket larger. A new dtype begins a new bucket.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if members:
            first, last = members[-1], members[0]
            dtype = layout.parameters[first].dtype
            buckets.append(Bucket(tuple(members), dtype, layout.places[first][0], layout.places[last][1]))
        members.clear()
        filled = 0

    for index in reversed(range(len(layout.parameters))):
        parameter = layout.parameters[index]
        if members and parameter.dtype != layout.parameters[members[-1]].dtype:
            close()
        members.append(index)
        filled += parameter.count * parameter.dtype.itemsize
        if filled >= bucket_bytes:
            close()
    close()
    return buckets
