"""One rank of the bench. Start it with `mpiexec -n 4 python -m mpitrain.forecast.bench [options]` or `mpitrain bench`.

A table has a cell for every operation, size and dtype, and each cell has all variants side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy

from mpitrain.allreduce.algorithm import DTYPES
from mpitrain.allreduce.select import choices
from mpitrain.errors import ConfigError, DeviceError
from mpitrain.forecast.bench_options import POINT_TO_POINT, Options, add_arguments, read_options
from mpitrain.forecast.bench_table import Row, as_csv, as_json, header, line, matrix, panels, preamble, size_text
from mpitrain.forecast.cluster_profile import (
    Link,
    Pairs,
    find_link,
    measure_cluster,
    measure_pairs,
    node_leaders,
    save_profile,
)
from mpitrain.forecast.on_gpus import about_gpus, transport_choices
from mpitrain.forecast.operations import MPI_ITSELF, NO_CODEC, OPERATIONS, Variants
from mpitrain.forecast.report import draw
from mpitrain.forecast.rounds import Measured, measure, ratio, spread
from mpitrain.job.start import init
from mpitrain.world.world import World

_LINE_SECONDS = 0.5  # the time between two changes of the progress line


class Progress:
    """The progress line. It prints nothing unless `is_wanted`, which is on rank 0 on a terminal."""

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._next = 0.0

    def tell(self, text: str) -> None:
        """Replace the line with `text`, but not too often."""
        if self._is_wanted and time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            self._write(text)

    def end(self) -> None:
        """Remove the line."""
        if self._is_wanted:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stdout.write(f"\r\x1b[K{text}")
        sys.stdout.flush()


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
    rounds = options.rounds or world.broadcast_object(fitting)
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


def main() -> int:
    """Run on every rank. Return the exit code: 1 if a value was wrong, 2 for wrong use."""
    # The present profile may be the reason for the measurement: it may be damaged, or belong to another cluster.
    is_profile = any(word.partition("=")[0] == "--save-profile" for word in sys.argv[1:])
    world = init(profile="") if is_profile else init()
    parser = argparse.ArgumentParser(prog="python -m mpitrain.forecast.bench", allow_abbrev=False)
    add_arguments(parser)
    # All ranks have the same arguments, so only one of them prints an error about them.
    with Path(os.devnull).open("w") as nowhere, contextlib.ExitStack() as silence:
        if not world.is_root:
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        arguments = parser.parse_args()
    try:
        with world.together("read the options"):
            options = read_options(arguments, writes=world.is_root)
        if options.dry_run:
            for text in choices(world) if options.device == "host" else transport_choices(world):
                world.print(text)
            return 0
        link = find_link(world, options.link_gbit)
        for text in [*preamble(world, link), *([f"# {about_gpus(world)}"] if options.device == "cuda" else [])]:
            world.print(text)
        return _profile(world, options) if options.save_profile else _bench(world, options, link)
    except (ConfigError, DeviceError) as error:  # the same on all ranks
        if world.is_root:
            print(f"mpitrain bench: {error}", file=sys.stderr)
        return 2


def _bench(world: World, options: Options, link: Link) -> int:
    rows: list[Row] = []
    several_nodes = world.num_nodes > 1
    for number, cell in enumerate(sweep(world, options, link)):
        for text in [*(header(several_nodes) if number == 0 else []), *(line(row, several_nodes) for row in cell)]:
            world.print(text)
        rows += cell
    pairs, names = _pairs(world, options) if POINT_TO_POINT in options.operations else (None, [])
    if pairs is not None:
        rates = [[rate / 1e9 for rate in row] for row in pairs.bytes_per_second]
        for text in [
            *matrix("latency (us): half the round trip of 1 byte, from row to column", names, pairs.latency_us, ".1f"),
            *matrix("bandwidth (GB/s): messages of 1 MiB, from row to column", names, rates, ".3f"),
        ]:
            world.print(text)
    with world.together("write the results"):
        if world.is_root:
            _write(world, options, link, rows, pairs, names)
    wrong = sum(row.wrong for row in rows)
    if wrong:
        world.print(f"# {wrong} elements are wrong: see #wrong")
    return 1 if wrong else 0


def _pairs(world: World, options: Options) -> tuple[Pairs | None, list[str]]:
    """Measure the pairs of nodes, by their leaders; on one node, the pairs of ranks."""
    progress = Progress(world.is_root and options.progress)
    members = list(range(world.size))
    if world.num_nodes > 1:
        members = [world.node_ranks.index(node) for node in range(world.num_nodes)]
    with node_leaders(world) as leaders:
        comm = world.comm if world.num_nodes == 1 else leaders
        pairs = measure_pairs(comm, progress.tell) if comm is not None else None
    progress.end()
    return world.broadcast_object(pairs), [world.hosts[rank] for rank in members]


def _write(world: World, options: Options, link: Link, rows: list[Row], pairs: Pairs | None, names: list[str]) -> None:
    if options.json:
        options.json.write_text(as_json(world, link, rows, pairs, names, options.device))
    if options.csv:
        options.csv.write_text(as_csv(rows))
    if options.plot:
        title = "\n".join(text.removeprefix("# ") for text in preamble(world, link))
        draw(options.plot, title, "size (bytes)", panels(rows), size_text)


def _profile(world: World, options: Options) -> int:
    progress = Progress(world.is_root and options.progress)
    measured = measure_cluster(world, progress.tell)
    progress.end()
    world.print(json.dumps(measured, indent=2))
    with world.together("write the profile"):
        if world.is_root and options.save_profile:
            save_profile(options.save_profile, world, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
