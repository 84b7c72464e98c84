"""OPERATIONS: how each operation is set up, run and checked, and its least cost.

To add an operation, write a function that makes its variants for a number of elements and a dtype, and add a line at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy

from mpitrain import collectives
from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import BFLOAT16, Algorithm
from mpitrain.allreduce.compressed import compressed
from mpitrain.arrays import Array
from mpitrain.compression import make_codec
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError
from mpitrain.forecast.on_gpus import device_sums
from mpitrain.forecast.rounds import Variant, count_wrong, fill, num_calls, real_sum_tile, real_tile, sum_tile, tile
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.forecast.bench_options import Options

# The name of the row with which all others are compared: MPI's own blocking call, as it is tuned here.
MPI_ITSELF = "mpi"
NO_CODEC = "none"
# The name of the calls in mpitrain.collectives, which have no choice of algorithms.
LIBRARY = "mpitrain"

# The row of an exchange with a codec. The exchange chooses its algorithm itself.
COMPRESSED = "compressed"

# (algorithm, codec) -> the variant to run.
Variants: TypeAlias = dict[tuple[str, str], Variant]
# Takes this rank's array and memory for a result, and returns the result, which may be elsewhere.
IntoNew: TypeAlias = Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]
# Takes a number of elements and their dtype, and returns the variants to compare.
MakeVariants: TypeAlias = Callable[[int, numpy.dtype], Variants]

_NOT_OF_MPI = (numpy.dtype(numpy.float16), BFLOAT16)


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        set_up: makes once what all sizes use, and returns the maker of variants. Collective.
        busbw_factor: busbw / algbw for so many ranks, as in nccl-tests.
        least: takes the number of ranks on each node (two nodes or more), and returns the share of the buffer that at
            least crosses some node's link in one direction.
        is_split: the buffer consists of the ranks' parts, and the count in the table is that of one part (nccl-tests).
    """

    set_up: Callable[[World, Options], MakeVariants]
    busbw_factor: Callable[[int], float]
    least: Callable[[Sequence[int]], float]
    is_split: bool = False


def _allreduce(world: World, options: Options) -> MakeVariants:
    from mpi4py import MPI

    if world.config.reduction == "exact":
        world.print("# plain sums, though reduction is exact; benchmarks/exact_sum.py measures exact ones")
    if options.device == "cuda":
        return device_sums(world, options.algorithms, options.has_all_algorithms)
    made: dict[tuple[str, str], Algorithm] = {}
    tolerances = {NO_CODEC: 0.0}
    if world.num_nodes == 1 and any(codec != NO_CODEC for codec in options.codecs):
        world.print(f"# {COMPRESSED}: all ranks are on one node, so nothing is compressed")
    for codec in options.codecs:
        if codec != NO_CODEC:
            coder = make_codec(codec)
            made[COMPRESSED, codec] = compressed(world, coder)
            tolerances[codec] = tolerance(coder, world.size)
            continue
        for name in options.algorithms:
            algorithm = _made(world, name, options.has_all_algorithms)
            if algorithm is not None:
                made[name, codec] = algorithm

    def variants(count: int, dtype: numpy.dtype) -> Variants:
        result: Variants = {}
        if dtype not in _NOT_OF_MPI:
            flats = [numpy.empty(count, dtype) for _ in range(num_calls(count * dtype.itemsize))]
            result[MPI_ITSELF, NO_CODEC] = _sums(
                world, 0.0, flats, lambda flat: world.comm.Allreduce(MPI.IN_PLACE, flat)
            )
        for (name, codec), algorithm in made.items():
            if codec != NO_CODEC and dtype != numpy.float32:
                continue
            flats = [algorithm.allocate(count, dtype) for _ in range(num_calls(count * dtype.itemsize))]
            result[name, codec] = _sums(world, tolerances[codec], flats, partial(sum_by, algorithm))
        return result

    return variants


def tolerance(codec: Codec, size: int) -> float:
    """Return the largest error by the codec of a sum of values in [-1, 1] over this many ranks.

    Each part is rounded once, and so is the sum. A hundredth is added for the codec's roundings in partial sums.
    """
    return 1.01 * 2 * size * codec.relative_error


def _sums(world: World, off_by: float, flats: Sequence[Array], add_up: Callable[[Array], object]) -> Variant:
    """Make a variant that replaces each of `flats` with its sum, one after the other. `off_by` is the allowed error."""
    if off_by:
        values, expected = real_tile(world.rank), real_sum_tile(world.size)
    else:
        dtype = flats[0].dtype
        values, expected = tile(world.rank, world.size, dtype), sum_tile(world.size, dtype)
    return Variant(
        run=lambda: [add_up(flat) for flat in flats],
        prepare=lambda: fill(flats, values),
        check=lambda: sum(count_wrong(flat, expected, off_by) for flat in flats),
        calls=len(flats),
    )


def sum_by(algorithm: Algorithm, flat: Array) -> None:
    """Sum a buffer, and wait for the end."""
    algorithm.start(flat, agreed=True).wait()


def _made(world: World, name: str, may_refuse: bool) -> Algorithm | None:
    """Make the algorithm; None if it refuses this World and was not requested by name."""
    try:
        return make_algorithm(world, name)
    except ConfigError as error:
        if not may_refuse:
            raise
        world.print(f"# {name} is left out: {error}")
        return None


def _reduce_scatter(world: World, _: Options) -> MakeVariants:
    from mpi4py import MPI

    def natively(flat: numpy.ndarray, result: numpy.ndarray) -> numpy.ndarray:
        world.comm.Reduce_scatter_block(flat, result, MPI.SUM)
        return result

    def variants(count: int, dtype: numpy.dtype) -> Variants:
        part = part_of(count, world.rank, world.size)
        expected = numpy.roll(sum_tile(world.size, dtype), -part.start)
        compared = {LIBRARY: _library(world, collectives.reduce_scatter)}
        if dtype not in _NOT_OF_MPI:
            compared = {MPI_ITSELF: natively, **compared}
        return _into_new(
            world, dtype, compared, count, count // world.size, lambda result: count_wrong(result, expected)
        )

    return variants


def _allgather(world: World, _: Options) -> MakeVariants:
    def natively(flat: numpy.ndarray, result: numpy.ndarray) -> numpy.ndarray:
        world.comm.Allgather(flat.view(numpy.uint8), result.view(numpy.uint8))
        return result

    def variants(count: int, dtype: numpy.dtype) -> Variants:
        expected = [tile(rank, world.size, dtype) for rank in range(world.size)]

        def wrong(result: numpy.ndarray) -> int:
            parts = numpy.split(result, world.size)
            return sum(count_wrong(part, values) for part, values in zip(parts, expected, strict=True))

        compared = {MPI_ITSELF: natively, LIBRARY: _library(world, collectives.allgather)}
        return _into_new(world, dtype, compared, count // world.size, count, wrong)

    return variants


def _broadcast(world: World, _: Options) -> MakeVariants:
    def natively(flat: numpy.ndarray, _: numpy.ndarray) -> numpy.ndarray:
        world.comm.Bcast(flat.view(numpy.uint8))
        return flat

    def variants(count: int, dtype: numpy.dtype) -> Variants:
        expected = tile(0, world.size, dtype)
        compared = {MPI_ITSELF: natively, LIBRARY: _library(world, collectives.broadcast)}
        return _into_new(world, dtype, compared, count, 0, lambda result: count_wrong(result, expected))

    return variants


def _library(world: World, call: Callable[[World, Array], collectives.Handle[Array]]) -> IntoNew:
    return lambda flat, _: call(world, flat).wait()


def _into_new(
    world: World,
    dtype: numpy.dtype,
    compared: Mapping[str, IntoNew],
    count: int,
    result_count: int,
    wrong: Callable[[numpy.ndarray], int],
) -> Variants:
    """Make variants that keep `count` elements, filled with this rank's tile, and make a result for `wrong` to
    check."""
    values = tile(world.rank, world.size, dtype)

    def variant(call: IntoNew) -> Variant:
        calls = num_calls(max(count, result_count) * dtype.itemsize)
        flats = [numpy.empty(count, dtype) for _ in range(calls)]
        given = [numpy.empty(result_count, dtype) for _ in range(calls)]  # for MPI's calls; mpitrain's make their own
        results: list[numpy.ndarray] = []

        def run() -> None:
            results[:] = [call(flat, result) for flat, result in zip(flats, given, strict=True)]

        return Variant(run, lambda: fill(flats, values), lambda: sum(wrong(result) for result in results), calls=calls)

    return {(name, NO_CODEC): variant(call) for name, call in compared.items()}


def _part_factor(size: int) -> float:
    return (size - 1) / size


def _busiest_node(nodes: Sequence[int]) -> float:
    """Return the share of a buffer of one part per rank that crosses the busiest link: its own parts, or all others."""
    return max(max(number, sum(nodes) - number) for number in nodes) / sum(nodes)


OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(_allreduce, lambda size: 2 * (size - 1) / size, lambda nodes: 2 * (1 - 1 / len(nodes))),
    "reduce_scatter": Operation(_reduce_scatter, _part_factor, _busiest_node, is_split=True),
    "allgather": Operation(_allgather, _part_factor, _busiest_node, is_split=True),
    "broadcast": Operation(_broadcast, lambda size: 1.0, lambda nodes: 1.0),
}
