"""What a model of costs needs to know of a cluster: measured in well under a minute, kept in one file."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from mpitrain.bench.network import Link
from mpitrain.bench.point_to_point import measure_pairs
from mpitrain.bench.rounds import Variant, measure, versions
from mpitrain.compression import CODECS, make_codec
from mpitrain.profile import fingerprint, to_json
from mpitrain.world import World

_BLOCK_BYTES = 2**25  # beyond any cache
_CODEC_BYTES = 2**23
_SMALL_BYTES = 4096
_MEMORY_ROUNDS, _SMALL_ROUNDS = 10, 100


def measure_cluster(world: World, link: Link, tell: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """What messages, links and memory cost. Collective; the same on every rank.

    Returns:
        latency_between_nodes_us: median over pairs of nodes, half a round trip of one byte; None on one node.
        latency_inside_node_us: the same of the ranks of a node, median over nodes; None with one rank on each.
        link_bytes_per_second: by node rank of the sender, then of the receiver; measured, one direction.
        link_gbit: nominal rate; None where it is not known.
        copy_bytes_per_second, add_bytes_per_second: of float32 that a rank copies, or adds in place to others,
            while all ranks do; the slowest rank's.
        codecs: by name: whether it is compiled on every rank, and as above, of float32, what a rank encodes with the
            error of it, decodes, and adds.
        small_allreduce_us: MPI's own allreduce of 4 KiB.
    """
    between = measure_pairs(world.leaders, tell) if world.leaders is not None and world.num_nodes > 1 else None
    world.barrier()  # in which the others wait without taking the leaders' cores
    inside = measure_pairs(world.node, tell) if world.local_size > 1 else None
    inside_us = _median_off_diagonal(inside.latency_us) if inside else None
    all_inside = [value for value in world.allgather(inside_us) if value is not None]
    pairs = world.broadcast(between)
    tell("memory")
    flat, other = numpy.ones(_BLOCK_BYTES // 4, numpy.float32), numpy.zeros(_BLOCK_BYTES // 4, numpy.float32)
    memory = {
        "copy": Variant(lambda: numpy.copyto(other, flat)),
        "add": Variant(lambda: numpy.add(flat, other, out=flat), prepare=lambda: flat.fill(1.0)),
    }
    measure(world, memory, 1)
    times = {name: statistics.median(its.seconds) for name, its in measure(world, memory, _MEMORY_ROUNDS).items()}
    tell("codecs")
    codecs = {name: _codec_rates(world, name) for name in CODECS}
    tell("small allreduce")
    return {
        "latency_between_nodes_us": _median_off_diagonal(pairs.latency_us) if pairs else None,
        "latency_inside_node_us": statistics.median(all_inside) if all_inside else None,
        "link_bytes_per_second": pairs.bytes_per_second if pairs else None,
        "link_gbit": link.gbit,
        "copy_bytes_per_second": _BLOCK_BYTES / times["copy"],
        "add_bytes_per_second": _BLOCK_BYTES / times["add"],
        "codecs": codecs,
        "small_allreduce_us": _small_allreduce(world) * 1e6,
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
    measure(world, variants, 1)
    rates = {
        f"{operation}_bytes_per_second": _CODEC_BYTES / statistics.median(its.seconds)
        for operation, its in measure(world, variants, _MEMORY_ROUNDS).items()
    }
    return {"compiled": all(world.allgather(codec.compiled)), **rates}


def _median_off_diagonal(table: list[list[float]]) -> float:
    return statistics.median(value for i, line in enumerate(table) for j, value in enumerate(line) if i != j)


def _small_allreduce(world: World) -> float:
    from mpi4py import MPI

    flat = numpy.zeros(_SMALL_BYTES // 4, numpy.float32)
    small = {"mpi": Variant(lambda: world.comm.Allreduce(MPI.IN_PLACE, flat))}
    measure(world, small, 3)
    return statistics.median(measure(world, small, _SMALL_ROUNDS)["mpi"].seconds)


def save_profile(path: Path, world: World, measured: dict[str, Any]) -> None:
    """Write the file that MPITRAIN_PROFILE names, whole or not at all. For rank 0 alone."""
    here = fingerprint(world.hosts, world.node_ranks, versions()["MPI"])
    nodes = [world.hosts[world.node_ranks.index(node)] for node in range(world.num_nodes)]
    new = path.with_name(path.name + ".new")
    new.write_text(to_json(measured, nodes, here, versions()))
    new.replace(path)
