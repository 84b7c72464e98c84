"""One rank of the bench. Start it with `mpiexec -n 4 python -m mpitrain.bench [options]` or `mpitrain bench`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from mpitrain.allreduce.select import choices
from mpitrain.bench.link import Link, find_link, node_leaders
from mpitrain.bench.measure import measure_cluster, save_profile
from mpitrain.bench.on_gpus import about_gpus, transport_choices
from mpitrain.bench.options import POINT_TO_POINT, Options, add_arguments, read_options
from mpitrain.bench.point_to_point import Pairs, measure_pairs
from mpitrain.bench.progress import Progress
from mpitrain.bench.summary import as_json, preamble
from mpitrain.bench.sweep import sweep
from mpitrain.bench.table import Row, as_csv, header, line, matrix
from mpitrain.errors import ConfigError, DeviceError
from mpitrain.job.start import init
from mpitrain.world import World


def main() -> int:
    """Run on every rank. Return the exit code: 1 if a value was wrong, 2 for wrong use."""
    # The present profile may be the reason for the measurement: it may be damaged, or belong to another cluster.
    is_profile = any(word.partition("=")[0] == "--save-profile" for word in sys.argv[1:])
    world = init(profile="") if is_profile else init()
    parser = argparse.ArgumentParser(prog="python -m mpitrain.bench", allow_abbrev=False)
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
        if options.show:
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
    return world.broadcast(pairs), [world.hosts[rank] for rank in members]


def _write(world: World, options: Options, link: Link, rows: list[Row], pairs: Pairs | None, names: list[str]) -> None:
    if options.json:
        options.json.write_text(as_json(world, link, rows, pairs, names, options.device))
    if options.csv:
        options.csv.write_text(as_csv(rows))
    if options.plot:
        from mpitrain.bench.plot import plot

        plot(options.plot, rows, "\n".join(text.removeprefix("# ") for text in preamble(world, link)))


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
