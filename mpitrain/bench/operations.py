"""OPERATIONS: how each operation is set up, run and checked, and what it must cost at least.

To add one: a function that makes its variants for a number of elements and a dtype, and a line at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import BFLOAT16, Algorithm
from mpitrain.arrays import Array
from mpitrain.bench import data
from mpitrain.bench.rounds import Variant
from mpitrain.errors import ConfigError
from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.bench.options import Options

# The name of the row that every other one is compared with: MPI's own blocking call, as installed.
MPI_ITSELF = "mpi"
NO_CODEC = "none"

# What can go over the wire, and how far the sum over so many ranks of values in [-1, 1] may be off by it.
TOLERANCES: dict[str, Callable[[int], float]] = {NO_CODEC: lambda size: 0.0}

# (algorithm, codec) -> what is run.
Variants: TypeAlias = dict[tuple[str, str], Variant]
# From a number of elements and their dtype to the variants that are compared.
MakeVariants: TypeAlias = Callable[[int, numpy.dtype], Variants]

# Calls of a run, and the bytes of their buffers.
_MOST_CALLS, _TOGETHER_BYTES = 16, 2**18

_NOT_OF_MPI = (numpy.dtype(numpy.float16), BFLOAT16)


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        set_up: makes what is used for all sizes, once; collective. Gives the maker of variants.
        busbw_factor: busbw / algbw for so many ranks, as nccl-tests has it.
        least: from the numbers of ranks on each node (two nodes or more): the share of the buffer that crosses some
            node's link in one direction at least.
        is_split: the buffer is the ranks' parts together, and the count in the table is one part's (nccl-tests).
    """

    set_up: Callable[[World, Options], MakeVariants]
    busbw_factor: Callable[[int], float]
    least: Callable[[Sequence[int]], float]
    is_split: bool = False


def _allreduce(world: World, options: Options) -> MakeVariants:
    from mpi4py import MPI

    made = {
        (name, codec): algorithm
        for name in options.algorithms
        for codec in options.codecs
        if (algorithm := _made(world, name, codec, options.has_all_algorithms)) is not None
    }

    def variants(count: int, dtype: numpy.dtype) -> Variants:
        found: Variants = {}
        if dtype not in _NOT_OF_MPI:
            flats = [numpy.empty(count, dtype) for _ in range(_calls(count * dtype.itemsize))]
            found[MPI_ITSELF, NO_CODEC] = _sums(
                world, NO_CODEC, flats, lambda flat: world.comm.Allreduce(MPI.IN_PLACE, flat)
            )
        for (name, codec), algorithm in made.items():
            flats = [algorithm.allocate(count, dtype) for _ in range(_calls(count * dtype.itemsize))]
            found[name, codec] = _sums(world, codec, flats, partial(_sum_by, algorithm))
        return found

    return variants


def _sums(world: World, codec: str, flats: Sequence[Array], add_up: Callable[[Array], object]) -> Variant:
    """Each of `flats` is replaced by its sum, one after the other."""
    tolerance = TOLERANCES[codec](world.size)
    if tolerance:
        values, expected = data.real_tile(world.rank), data.real_sum_tile(world.size)
    else:
        dtype = flats[0].dtype
        values, expected = data.tile(world.rank, world.size, dtype), data.sum_tile(world.size, dtype)
    return Variant(
        run=lambda: [add_up(flat) for flat in flats],
        prepare=lambda: data.fill(flats, values),
        check=lambda: sum(data.count_wrong(flat, expected, tolerance) for flat in flats),
        calls=len(flats),
    )


def _sum_by(algorithm: Algorithm, flat: Array) -> None:
    algorithm.start(flat).wait()


def _calls(num_bytes: int) -> int:
    """In one run, each with a buffer of its own: a single short call would be timed with the way out of the barrier."""
    return max(1, min(_MOST_CALLS, _TOGETHER_BYTES // num_bytes))


def _made(world: World, name: str, codec: str, may_refuse: bool) -> Algorithm | None:
    """The algorithm with its codec; None if it is not for this world and nobody asked for it by name."""
    assert codec == NO_CODEC
    try:
        return make_algorithm(world, name)
    except ConfigError as error:
        if not may_refuse:
            raise
        world.print(f"# {name} is left out: {error}")
        return None


OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(_allreduce, lambda size: 2 * (size - 1) / size, lambda nodes: 2 * (1 - 1 / len(nodes))),
}
