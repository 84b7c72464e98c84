"""Data sources for the tests of data, and the steps that one process makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy

from mpitrain import World
from mpitrain.data import ArrayData, MapData, StreamData
from mpitrain.data.order import permuted
from mpitrain.data.samples import random_of

COUNT, GLOBAL_BATCH, SEED = 23, 9, 6  # an epoch's last batch has 5 samples: fewer than the ranks, from 6 on


STEPS = 7  # two epochs and a step


class Table:
    """A map-style data set; keeps the numbers it was asked for."""

    def __init__(self, by_array: bool) -> None:
        self.by_array = by_array
        self.asked: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: Any) -> Any:
        assert isinstance(number, numpy.ndarray if self.by_array else int)
        self.asked += numpy.atleast_1d(number).tolist()
        values = numpy.asarray(number, "f4")
        return number, numpy.stack([values, -values], axis=-1)


def arrays() -> tuple[numpy.ndarray, numpy.ndarray]:
    numbers = numpy.arange(COUNT)
    return numbers, numpy.stack([numbers, -numbers], axis=-1).astype("f4")


def stream(epoch: int) -> Iterator[Any]:
    """Another order in every epoch."""
    for number in numpy.roll(numpy.arange(COUNT), epoch).tolist():
        yield number, numpy.array([number, -number], "f4")


SOURCES: dict[str, Callable[..., Any]] = {
    "arrays": lambda world, **options: ArrayData(world, arrays(), **options),
    "in order": lambda world, **options: ArrayData(world, arrays(), shuffle=False, **options),
    "items": lambda world, **options: MapData(world, Table(False), **options),
    "batches": lambda world, **options: MapData(world, Table(True), by_array=True, **options),
    "stream": lambda world, **options: StreamData(world, stream, **options),
    "counted stream": lambda world, **options: StreamData(world, stream, num_samples=COUNT, **options),
}


def expected_steps(source: str, augment: bool, steps: int = STEPS) -> list[list[tuple[int, list[float]]]]:
    """The samples of each step that one process without any of our classes sees."""
    found: list[list[tuple[int, list[float]]]] = []
    for epoch in range(steps):
        if "stream" in source:
            order = numpy.roll(numpy.arange(COUNT), epoch).tolist()
        elif source == "in order":
            order = list(range(COUNT))
        else:
            order = permuted(numpy.arange(COUNT), COUNT, (SEED, epoch)).tolist()
        places = order if "stream" not in source else range(COUNT)
        samples = []
        for place, number in zip(places, order, strict=True):
            value = numpy.array([number, -number], "f4")
            if augment:
                value = value + random_of(SEED, epoch, place).standard_normal(1 + number % 3).sum(dtype="f4")
            samples.append((number, value.tolist()))
        found += [samples[begin : begin + GLOBAL_BATCH] for begin in range(0, COUNT, GLOBAL_BATCH)]
    return found[:steps]


def own_steps(data: Any, steps: int) -> list[list[tuple[int, list[float]]]]:
    """This rank's samples of each step. Check their containers."""
    found = []
    for _ in range(steps):
        (numbers, values), weight = next(data)
        assert type(weight) is int
        assert len(numbers) == len(values) == weight
        assert numbers.dtype.kind == "i"
        assert (values.dtype, values.shape[1:]) == (numpy.float32, (2,))
        found.append(list(zip(numbers.tolist(), values.tolist(), strict=True)))
    return found


def put_together(world: World, mine: list[list[Any]]) -> list[list[Any]]:
    """The ranks' parts of each step in rank order."""
    return [[sample for part in parts for sample in part] for parts in zip(*world.allgather(mine), strict=True)]


def global_steps(world: World, data: Any, steps: int) -> list[list[tuple[int, list[float]]]]:
    """The samples of each step that all ranks together see."""
    return put_together(world, own_steps(data, steps))
