"""The cells of a table: every operation, size and dtype, and in each cell all variants side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy

from mpitrain.allreduce.algorithm import DTYPES
from mpitrain.bench.link import Link
from mpitrain.bench.operations import MPI_ITSELF, NO_CODEC, OPERATIONS, Variants
from mpitrain.bench.options import Options
from mpitrain.bench.progress import Progress
from mpitrain.bench.rounds import Measured, measure, ratio, spread
from mpitrain.bench.table import Row
from mpitrain.errors import ConfigError
from mpitrain.world import World

# These rounds make connections and scratch memory. They only determine the number of rounds.
_WARM_UP_ROUNDS = 2
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 200
_BASE = (MPI_ITSELF, NO_CODEC)


def sweep(world: World, options: Options, link: Link) -> Iterator[list[Row]]:
    """Yield the rows of each cell after its measurement, the same on every rank. Collective.

    Raises:
        ConfigError: an operation splits the buffer among ranks, and a size is less than one element per rank.
    """
    dtypes = {str(dtype): dtype for dtype in DTYPES}
    for name in options.operations:
        if name not in OPERATIONS:
            continue
        operation = OPERATIONS[name]
        make_variants = operation.set_up(world, options)
        for dtype in (dtypes[dtype] for dtype in options.dtypes):
            for size in options.sizes_bytes:
                count = size // dtype.itemsize
                if operation.is_split:  # the buffer is split into equal parts, as in nccl-tests
                    count = count // world.size * world.size
                    if count == 0:
                        raise ConfigError(
                            f"--sizes: {size} bytes of {dtype} are less than one element for each of {world.size} ranks"
                        )
                measured = _measure(world, options, link, make_variants(count, dtype), f"{name} {size} {dtype}")
                yield [_row(world, link, name, count, dtype, key, measured) for key in measured]


def _measure(
    world: World, options: Options, link: Link, variants: Variants, title: str
) -> dict[tuple[str, str], Measured]:
    progress = Progress(world.is_root and options.progress)
    progress.tell(f"{title}: warming up")
    started = time.perf_counter()
    trial = measure(world, variants, _WARM_UP_ROUNDS)
    a_round = (time.perf_counter() - started) / _WARM_UP_ROUNDS
    fitting = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(options.seconds / a_round)))
    rounds = options.rounds or world.broadcast(fitting)
    measured = measure(
        world, variants, rounds, link.counters, lambda number: progress.tell(f"{title}: round {number + 1} of {rounds}")
    )
    progress.end()
    return {
        name: Measured(times.seconds, times.cores, times.link_bytes, times.wrong + trial[name].wrong)
        for name, times in measured.items()
    }


def _row(
    world: World,
    link: Link,
    name: str,
    count: int,
    dtype: numpy.dtype,
    key: tuple[str, str],
    measured: dict[tuple[str, str], Measured],
) -> Row:
    operation, measurement = OPERATIONS[name], measured[key]
    size = count * dtype.itemsize
    seconds, low, high = spread(measurement.seconds)
    algbw = size / seconds / 1e9
    nodes = [world.node_ranks.count(node) for node in range(world.num_nodes)]
    least = size * operation.least(nodes) if len(nodes) > 1 else 0.0
    bound = least * 8 / (link.gbit * 1e9) if least and link.gbit else None
    crossed = int(spread(measurement.link_bytes)[0]) if least and any(measurement.link_bytes) else None
    seconds_by_key = {each: times.seconds for each, times in measured.items()}
    return Row(
        size_bytes=size,
        count=count // world.size if operation.is_split else count,
        operation=name,
        dtype=str(dtype),
        algorithm=key[0],
        codec=key[1],
        rounds=len(measurement.seconds),
        time_us=seconds * 1e6,
        p10_us=low * 1e6,
        p90_us=high * 1e6,
        algbw=algbw,
        busbw=algbw * operation.busbw_factor(world.size),
        wrong=measurement.wrong,
        bound_us=bound * 1e6 if bound else None,
        share_of_bound=bound / seconds if bound else None,
        link_bytes=crossed,
        link_multiple=crossed / least if crossed else None,
        cores=measurement.cores,
        ratio_to_mpi=ratio(seconds_by_key, key, _BASE)[0] if _BASE in seconds_by_key else None,
    )
