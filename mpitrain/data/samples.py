"""Samples by number, and how single samples become a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy

from mpitrain.errors import DataError
from mpitrain.tree import Tree, leaves, num_samples, plain_leaves, rebuild

# augment(sample, random) -> sample
Augment: TypeAlias = Callable[[Any, numpy.random.Generator], Tree]


class Source(Protocol):
    """Samples by number."""

    def batch(self, numbers: numpy.ndarray) -> Tree:
        """Return these samples, at least one, in new arrays along the first dimension."""
        ...

    def each(self, numbers: numpy.ndarray) -> Iterator[Any]:
        """Yield these samples one after the other."""
        ...


class Arrays:
    """A tree of arrays with the samples along the first dimension."""

    def __init__(self, arrays: Tree) -> None:
        self._arrays = arrays
        self._leaves = [leaf for _, leaf in leaves(arrays)]

    def batch(self, numbers: numpy.ndarray) -> Tree:
        """See Source."""
        values = (leaf[numbers] for leaf in self._leaves)
        return rebuild(self._arrays, values.__next__)

    def each(self, numbers: numpy.ndarray) -> Iterator[Tree]:
        """See Source. The samples are copies: a change to one does not change the data set."""
        return rows(self.batch(numbers))


class Items:
    """Anything whose `[number]` is one sample."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def batch(self, numbers: numpy.ndarray) -> Tree:
        """See Source."""
        return stack(list(self.each(numbers)), numbers)

    def each(self, numbers: numpy.ndarray) -> Iterator[Any]:
        """See Source."""
        for number in numbers.tolist():
            try:
                sample = self._items[number]
            except Exception as error:
                error.add_note(f"in sample {number}")
                raise
            yield sample


class Batches:
    """Anything whose `[array of numbers]` is a tree of arrays, these samples along their first dimension."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def batch(self, numbers: numpy.ndarray) -> Tree:
        """See Source."""
        try:
            batch = self._batches[numbers]
        except Exception as error:
            error.add_note(f"in samples {_shortened(numbers)}")
            raise
        if num_samples(batch) != len(numbers):
            raise DataError(f"the data set returned {num_samples(batch)} samples; it must return {len(numbers)}")
        return batch

    def each(self, numbers: numpy.ndarray) -> Iterator[Tree]:
        """See Source."""
        return rows(self.batch(numbers))


def rows(batch: Tree) -> Iterator[Tree]:
    """Yield the samples of a batch as views of its arrays."""
    of_leaves = [leaf for _, leaf in leaves(batch)]
    for row in range(num_samples(batch)):
        values = (leaf[row] for leaf in of_leaves)
        yield rebuild(batch, values.__next__)


def stack(samples: Sequence[Tree], numbers: Sequence[int] | numpy.ndarray) -> Tree:
    """Make a batch of single samples, at least one: trees of CPU arrays and numbers, all of the same form.

    Raises:
        DataError: two samples differ in form, shape or dtype. The error names both by their `numbers`.
        TreeError: a sample is not a tree of arrays.
    """
    columns = [[(path, numpy.asarray(leaf)) for path, leaf in plain_leaves(sample)] for sample in samples]
    for number, column in zip(numbers, columns, strict=True):
        if _form(column) != _form(columns[0]):
            raise DataError(
                f"samples of one batch must be alike: sample {number} has {_text(column)}, "
                f"sample {numbers[0]} {_text(columns[0])}"
            )
    values = (numpy.stack([value for _, value in row]) for row in zip(*columns, strict=True))
    return rebuild(samples[0], values.__next__)


def augmented(augment: Augment, samples: Iterator[Any], numbers: Sequence[int], seed: int, epoch: int) -> Tree:
    """Make a batch of the samples, each changed by `augment` with its own random numbers."""
    changed = []
    for number, sample in zip(numbers, samples, strict=True):
        try:
            changed.append(augment(sample, random_of(seed, epoch, number)))
        except Exception as error:
            error.add_note(f"in augment, of sample {number}")
            raise
    return stack(changed, numbers)


def random_of(seed: int, epoch: int, number: int) -> numpy.random.Generator:
    """Return a generator of random numbers that depend only on the seed, the epoch and the sample."""
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence((seed, epoch, number))))


def _form(column: list[tuple[str, numpy.ndarray]]) -> list[tuple[str, tuple[int, ...], numpy.dtype]]:
    return [(path, value.shape, value.dtype) for path, value in column]


def _text(column: list[tuple[str, numpy.ndarray]]) -> str:
    return ", ".join(f"{path} {value.dtype} {value.shape}".strip() for path, value in column) or "nothing"


def _shortened(numbers: numpy.ndarray) -> str:
    return ", ".join(str(number) for number in numbers[:5].tolist()) + (", ..." if len(numbers) > 5 else "")
