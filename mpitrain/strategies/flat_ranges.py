"""Ranges of flat parameters, and how the parameters are cut into fragments of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mpitrain.adapters.adapter import LocalModel
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, everywhere


@dataclass(frozen=True)
class FlatRange:
    """A range of one array of a model's parameters, in elements.

    Attributes:
        is_trained: False for a buffer that changes by a mean over the samples.
    """

    name: str
    begin: int
    end: int
    is_whole: bool
    is_trained: bool

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.begin}:{self.end}]"

    def of(self, values: Mapping[str, Array]) -> Array:
        """Return this range of the array of its name; a view."""
        return values[self.name].reshape(-1)[self.begin : self.end]


def cut(model: LocalModel, count: int) -> list[list[FlatRange]]:
    """Cut what is trained, in the order of the layout, into `count` parts of equally many elements.

    Raises:
        ConfigError: there are fewer elements. Raised on every rank.
    """
    values, names = model.parameters(), [parameter.name for parameter in model.layout]
    num_trained = len(names) - getattr(model, "num_buffers", 0)
    total = sum(values[name].size for name in names)
    if count > total:
        raise everywhere(
            ConfigError(f"fragments={count} of a model with {total} trained elements; allowed are 1 to {total}")
        )
    bounds = [total * number // count for number in range(count + 1)]
    parts: list[list[FlatRange]] = [[] for _ in range(count)]
    first = 0  # of the array, in elements of the whole
    for index, name in enumerate(names):
        size = values[name].size
        for part, (low, high) in enumerate(pairwise(bounds)):
            begin, end = max(low - first, 0), min(high - first, size)
            # An array without elements belongs to the first part.
            if begin < end or (size == 0 and part == 0):
                parts[part].append(FlatRange(name, begin, end, end - begin == size, index < num_trained))
        first += size
    return parts
