"""Compare variants fairly on a noisy machine: in the same processes, in turns, by medians and spread.

The values differ between ranks and places, and their sums are known without mpitrain's code. A rank's values are a tile
of TILE elements, repeated. TILE is a prime, so a segment or piece in the wrong place does not meet equal values.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16
from mpitrain.profile import library_name
from mpitrain.world.world import World

TILE = 65521
# Sums of up to 16 x 16 ranks' values are exact even with the 8 bits of bfloat16.
_LARGEST = 16


def tile(rank: int, size: int, dtype: numpy.dtype) -> numpy.ndarray:
    """Return whole numbers from 0, so small that their sum over `size` ranks is exact in `dtype` (up to 256 ranks)."""
    largest = max(1, min(_LARGEST, _exact_up_to(dtype) // size))
    return numpy.random.default_rng(rank).integers(0, largest + 1, TILE).astype(dtype)


def real_tile(rank: int) -> numpy.ndarray:
    """Return float32 values spread evenly over [-1, 1)."""
    return numpy.random.default_rng(rank).uniform(-1, 1, TILE).astype(numpy.float32)


def sum_tile(size: int, dtype: numpy.dtype) -> numpy.ndarray:
    """Return the sum of all ranks' tiles, added up in int64; integers wrap."""
    total = numpy.zeros(TILE, numpy.int64)
    for rank in range(size):
        total += tile(rank, size, dtype).astype(numpy.int64)
    return total.astype(dtype)


def real_sum_tile(size: int) -> numpy.ndarray:
    """Return the sum of all ranks' real tiles, in float64."""
    return sum((real_tile(rank).astype(numpy.float64) for rank in range(size)), numpy.zeros(TILE))


def fill(flats: Iterable[numpy.ndarray], values: numpy.ndarray) -> None:
    """Overwrite each of `flats` with the repeated tile."""
    for flat in flats:
        whole = flat.size // TILE * TILE
        flat[:whole].reshape(-1, TILE)[:] = values
        flat[whole:] = values[: flat.size - whole]


def count_wrong(flat: numpy.ndarray, expected: numpy.ndarray, tolerance: float = 0.0) -> int:
    """Count the elements that differ from the repeated tile: in their bits, or by more than `tolerance`."""
    whole = flat.size // TILE * TILE
    parts = [(flat[:whole].reshape(-1, TILE), expected), (flat[whole:], expected[: flat.size - whole])]
    if tolerance == 0.0:
        words = f"u{flat.itemsize}"
        return sum(int(numpy.count_nonzero(part.view(words) != right.view(words))) for part, right in parts)
    # This form counts NaN as wrong.
    return sum(int(numpy.count_nonzero(~(numpy.abs(part - right) <= tolerance))) for part, right in parts)


def _exact_up_to(dtype: numpy.dtype) -> int:
    """Return the largest number up to which the dtype has every whole number."""
    if dtype == BFLOAT16:
        return 2**8
    return int(numpy.iinfo(dtype).max) if dtype.kind in "iu" else 2 ** int(numpy.finfo(dtype).nmant + 1)


# Calls per run, and the bytes of their buffers.
_MOST_CALLS, _TOGETHER_BYTES = 16, 2**18

# The name of a variant.
Key = TypeVar("Key", str, tuple[str, str])


def _nothing() -> int:
    return 0


@dataclass(frozen=True)
class Variant:
    """One of the compared variants. Only `run` is timed."""

    run: Callable[[], object]  # makes `calls` calls, one after the other
    prepare: Callable[[], object] = _nothing  # is called before each run, for example to fill the buffer again
    check: Callable[[], int] = _nothing  # is called after each run; returns the number of wrong elements on this rank
    calls: int = 1


@dataclass(frozen=True)
class Measured:
    """The result of the rounds of one variant, the same on every rank.

    Attributes:
        seconds: the slowest rank's time of a call, by round.
        cores: CPU seconds per second during the runs, over all threads of a rank, mean over ranks.
        link_bytes: the bytes of a call that crossed a node's network interface in one direction, by round, for the
            node and direction with the most bytes.
        wrong: the number of wrong elements, over all ranks and rounds.
    """

    seconds: list[float]
    cores: float
    link_bytes: list[int]
    wrong: int


def measure(
    world: World,
    variants: Mapping[Key, Variant],
    rounds: int,
    link_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
    tell: Callable[[int], object] = lambda number: None,
) -> dict[Key, Measured]:
    """Run every variant once per round; every other round runs in reverse order. Collective.

    Each run begins with a barrier. Ranks exchange results only after the last round, so this disturbs no run.

    Args:
        world: the World whose ranks run.
        variants: the variants by name, with the same names on every rank.
        rounds: the number of rounds, at least 1, the same on every rank.
        link_bytes: returns this node's counters (received, sent). The lowest rank of every node calls it before and
            after each run. The counts include the two barriers around the run: some hundred bytes.
        tell: is called before each round with its number.
    """
    table = {name: numpy.zeros((rounds, 4)) for name in variants}  # seconds, CPU seconds, bytes received and sent
    wrong = dict.fromkeys(variants, 0)
    counts = link_bytes if world.local_rank == 0 else lambda: (0, 0)
    for number in range(rounds):
        tell(number)
        for name in sorted(variants, reverse=bool(number % 2)):
            variant = variants[name]
            variant.prepare()
            before = counts()
            world.comm.Barrier()
            cpu, started = time.process_time(), time.perf_counter()
            variant.run()
            ended, cpu_ended = time.perf_counter(), time.process_time()
            world.comm.Barrier()
            after = counts()
            spent = ended - started, cpu_ended - cpu, after[0] - before[0], after[1] - before[1]
            table[name][number] = [value / variant.calls for value in spent]
            wrong[name] += variant.check()
    return {name: _over_ranks(world, table[name], wrong[name]) for name in variants}


def num_calls(num_bytes: int) -> int:
    """Return the calls per run, each with its own buffer. A single short call would be timed with the barrier's end."""
    return max(1, min(_MOST_CALLS, _TOGETHER_BYTES // num_bytes))


def _over_ranks(world: World, table_of_rank: numpy.ndarray, wrong: int) -> Measured:
    gathered = world.allgather((table_of_rank, wrong))
    times = numpy.array([table for table, _ in gathered])
    return Measured(
        seconds=times[:, :, 0].max(axis=0).tolist(),
        cores=float(times[:, :, 1].sum() / times[:, :, 0].sum()),
        link_bytes=times[:, :, 2:].max(axis=(0, 2)).astype(int).tolist(),
        wrong=sum(number for _, number in gathered),
    )


def alternate(world: World, calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each round of each call, after one round that does not count. Collective."""
    variants = {name: Variant(call) for name, call in calls.items()}
    measure(world, variants, 1)
    return {name: measured.seconds for name, measured in measure(world, variants, rounds).items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the 10th and the 90th percentile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), tenths[0], tenths[-1]


def ratio(seconds: Mapping[Key, Sequence[float]], name: Key, base: Key) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios name / base, and their 10th and 90th percentile."""
    return spread([one / other for one, other in zip(seconds[name], seconds[base], strict=True)])


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, mpitrain, its dependencies, `packages`, the MPI library and the kernel."""
    from mpi4py import MPI

    from mpitrain import __version__

    return {
        "mpitrain": __version__,
        "Python": platform.python_version(),
        **{package: version(package) for package in ("mpi4py", "numpy", *packages)},
        "MPI": library_name(MPI.Get_library_version()),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions_line(*packages: str) -> str:
    """Return `versions` in one line, for a log."""
    by_name = versions(*packages)
    named = [f"{name} {text}" for name, text in by_name.items() if name not in ("MPI", "kernel")]
    return ", ".join([*named, by_name["MPI"], by_name["kernel"]])
