"""Measure the properties of a cluster that a cost model needs, in well under a minute. They are kept in one file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Algorithm
from mpitrain.bench.link import node_leaders
from mpitrain.bench.operations import num_calls, sum_by
from mpitrain.bench.point_to_point import Pairs, measure_pairs
from mpitrain.bench.rounds import Variant, measure, ratio, versions
from mpitrain.compression import CODECS, make_codec
from mpitrain.profile import DEFAULT, Profile, fingerprint, to_json
from mpitrain.world import World

_BLOCK_BYTES = 2**25  # larger than any cache
_CODEC_BYTES = 2**23
_MEMORY_ROUNDS = 10
# The sizes at which two algorithms are compared, each four times the one before. The limit is in the middle of two.
_LIMIT_BYTES = tuple(2**exponent for exponent in (12, 14, 16, 18, 20))
_LIMIT_ROUNDS = 15


def measure_cluster(world: World, tell: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Measure the cost of messages, links and memory. Collective; the result is the same on every rank.

    Returns:
        latency_between_nodes_us: half the round trip of one byte, median over pairs of nodes; None on one node.
        link_bytes_per_second: measured in one direction, by the sender's node rank, then by the receiver's; None on
            one node.
        link_latency_us: half the round trip of one byte, likewise.
        copy_bytes_per_second, add_bytes_per_second: the rate at which the slowest rank copies float32, or adds float32
            in place, while all ranks do so.
        codecs: by name: whether the codec is compiled on every rank; and, as above, the rates of float32 at which a
            rank encodes with its error, decodes, and adds.
        native_below_bytes: below this size MPI's own allreduce was faster, above it the algorithm that auto takes for
            large buffers.
    """
    with node_leaders(world) as leaders:
        between = measure_pairs(leaders, tell) if leaders is not None and world.num_nodes > 1 else None
    world.barrier()  # the other ranks wait here without taking the leaders' cores
    pairs: Pairs | None = world.broadcast(between)
    tell("memory")
    flat, other = numpy.ones(_BLOCK_BYTES // 4, numpy.float32), numpy.zeros(_BLOCK_BYTES // 4, numpy.float32)
    memory = {
        "copy": Variant(lambda: numpy.copyto(other, flat)),
        "add": Variant(lambda: numpy.add(flat, other, out=flat), prepare=lambda: flat.fill(1.0)),
    }
    measure(world, memory, 1)
    times = {name: statistics.median(row.seconds) for name, row in measure(world, memory, _MEMORY_ROUNDS).items()}
    tell("codecs")
    codecs = {name: _codec_rates(world, name) for name in CODECS}
    tell("small buffers")
    return {
        "latency_between_nodes_us": _median_off_diagonal(pairs.latency_us) if pairs else None,
        "link_bytes_per_second": pairs.bytes_per_second if pairs else None,
        "link_latency_us": pairs.latency_us if pairs else None,
        "copy_bytes_per_second": _BLOCK_BYTES / times["copy"],
        "add_bytes_per_second": _BLOCK_BYTES / times["add"],
        "codecs": codecs,
        "native_below_bytes": native_below(world if pairs is None else replace(world, profile=_between(pairs))),
    }


def _codec_rates(world: World, name: str) -> dict[str, Any]:
    codec = make_codec(name)
    values = numpy.random.default_rng(world.rank).standard_normal(_CODEC_BYTES // 4, numpy.float32)
    error, wire = numpy.empty_like(values), numpy.empty(codec.wire_bytes(values.size), numpy.uint8)
    variants = {
        "encode": Variant(lambda: codec.encode(values, wire, error)),
        "decode": Variant(lambda: codec.decode(wire, error)),
        "add": Variant(lambda: codec.add(wire, error), prepare=lambda: error.fill(0.0)),
    }
    codec.encode(values, wire, error)  # decode and add must not find what happened to be in memory
    measure(world, variants, 1)
    rates = {
        f"{operation}_bytes_per_second": _CODEC_BYTES / statistics.median(measured.seconds)
        for operation, measured in measure(world, variants, _MEMORY_ROUNDS).items()
    }
    return {"compiled": all(world.allgather(codec.compiled)), **rates}


def _median_off_diagonal(table: list[list[float]]) -> float:
    return statistics.median(value for i, line in enumerate(table) for j, value in enumerate(line) if i != j)


def _between(pairs: Pairs) -> Profile:
    """Return the profile by which auto will choose between ring and direct."""
    latency, rate = _median_off_diagonal(pairs.latency_us) * 1e-6, _median_off_diagonal(pairs.bytes_per_second)
    return replace(DEFAULT, latency_seconds=latency, bytes_per_second=rate)


def native_below(world: World) -> int:
    """Return the size in bytes up to which native is faster than auto's choice for large buffers. Collective."""
    large = "shared_memory" if world.num_nodes == 1 else "hierarchical"
    algorithms = {name: ALGORITHMS[name].make(world) for name in ("native", large)}
    is_native_faster = {}
    for num_bytes in _LIMIT_BYTES:
        variants = {name: _sums(algorithm, num_bytes) for name, algorithm in algorithms.items()}
        measure(world, variants, 3)
        times = {name: measured.seconds for name, measured in measure(world, variants, _LIMIT_ROUNDS).items()}
        is_native_faster[num_bytes] = ratio(times, large, "native")[0] >= 1
    return crossover(is_native_faster)


def _sums(algorithm: Algorithm, num_bytes: int) -> Variant:
    flats = [algorithm.allocate(num_bytes // 4, numpy.dtype(numpy.float32)) for _ in range(num_calls(num_bytes))]
    for flat in flats:
        flat.fill(0)

    def run() -> None:
        for flat in flats:
            sum_by(algorithm, flat)

    return Variant(run, calls=len(flats))


def crossover(is_native_faster: Mapping[int, bool]) -> int:
    """Return the limit, in the middle between the last size at which native was faster, and the next (fourfold) one."""
    return max((2 * size for size, is_faster in is_native_faster.items() if is_faster), default=0)


def save_profile(path: Path, world: World, measured: dict[str, Any]) -> None:
    """Write the file for MPITRAIN_PROFILE, completely or not at all. Only rank 0 calls this."""
    here = fingerprint(world.hosts, world.node_ranks, versions()["MPI"])
    nodes = [world.hosts[world.node_ranks.index(node)] for node in range(world.num_nodes)]
    new = path.with_name(path.name + ".new")
    new.write_text(to_json(measured, nodes, here, versions()))
    new.replace(path)
