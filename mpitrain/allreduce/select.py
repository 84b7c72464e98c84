"""auto: the algorithm for a buffer's size, the same on all ranks because it depends on nothing else."""

from __future__ import annotations

import numpy

from mpitrain.allreduce.algorithm import Progress, Sequential
from mpitrain.allreduce.costs import bucket_bytes, compression, native_below_bytes, predicted, ring_from_bytes
from mpitrain.allreduce.group import everyone, num_lanes
from mpitrain.allreduce.hierarchical import by_size, hierarchical_steps
from mpitrain.allreduce.native import native_steps
from mpitrain.allreduce.shared_memory import NodeArrays, shared_memory_steps
from mpitrain.world import World


def auto(world: World) -> Sequential:
    """native for what is small; then shared memory in a node, and between nodes. See Algorithm for the contract."""
    memory = NodeArrays(world)
    native, limit = native_steps(world.comm), native_below_bytes(world.profile, len(set(world.node_ranks)))
    large = shared_memory_steps(memory) if world.num_nodes == 1 else hierarchical_steps(world, memory, by_size(world))

    def steps(flat: numpy.ndarray, residual: numpy.ndarray | None = None) -> Progress:
        return (native if flat.nbytes < limit else large)(flat, residual)

    return Sequential(world, "auto", steps, memory)


def choices(world: World) -> list[str]:
    """What is done in this world by its settings and its profile, in lines for a person."""
    profile, config = world.profile, world.config
    lines = [
        f"profile: {profile.origin}; {profile.latency_seconds * 1e6:.0f} us, {profile.bytes_per_second / 1e6:.0f} MB/s"
    ]
    if config.algorithm == "auto":
        lines += _by_size(world)
    else:
        lines.append(f"all sizes: {config.algorithm}, as MPITRAIN_ALGORITHM says")
    if world.num_nodes > 1 and config.algorithm in ("auto", "hierarchical", "ring"):
        order = [world.hosts[rank] for rank in everyone(world).members]
        lines.append(f"ring: {' '.join(dict.fromkeys(order))}")
    if config.compression != "none":
        lines.append(_compression(world))
    lines.append(f"buckets: {config.bucket_mib or bucket_bytes(profile, world.num_nodes) / 2**20:g} MiB")
    return lines


def _by_size(world: World) -> list[str]:
    nodes, lanes, profile = world.num_nodes, num_lanes(world), world.profile
    native = native_below_bytes(profile, nodes)
    lines = [f"below {native // 1024} KiB: native"] if native else []
    ranks_per_node = [world.node_ranks.count(node) for node in range(nodes)]
    prediction = f"predicted for 16 MiB: {predicted(2**24, profile, ranks_per_node) * 1e3:.1f} ms"
    if nodes == 1:
        return [*lines, f"from {native // 1024} KiB: shared_memory", *([prediction] if profile.is_measured else [])]
    limit = ring_from_bytes(profile, nodes, lanes) * lanes
    inside = "" if nodes == world.size else "shared memory inside each node, "
    if limit > native:
        lines.append(f"from {native // 1024} KiB: {inside}direct between nodes")
    lines.append(f"from {max(limit, native) // 1024} KiB: {inside}ring between nodes")
    return [*lines, prediction]


def _compression(world: World) -> str:
    """Of gradients; the algorithm is for all else."""
    name = world.config.compression
    if world.num_nodes == 1:
        return f"compression {name}: none, as all ranks are on one node"
    chosen = compression(world.profile, world.num_nodes, num_lanes(world)) if name == "auto" else name
    said = f"compression {name}: {chosen}" if name == "auto" else f"compression {name}"
    if chosen != "none":
        return f"{said}; gradients of all sizes go by direct between nodes"
    return f"{said}, as the profile says" if world.profile.is_measured else f"{said}, as the network is not known"
