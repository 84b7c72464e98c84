"""auto: the algorithm for a buffer's size, the same on all ranks because it depends on nothing else."""

from __future__ import annotations

import numpy

from mpitrain.allreduce.algorithm import Progress, Sequential
from mpitrain.allreduce.costs import bucket_bytes, native_below_bytes, ring_from_bytes, seconds
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
    """What `auto` does in this world, in lines for a person."""
    nodes, lanes, profile = world.num_nodes, num_lanes(world), world.profile
    native = native_below_bytes(profile, nodes)
    lines = [
        f"profile: {profile.origin}; {profile.latency_seconds * 1e6:.0f} us, {profile.bytes_per_second / 1e6:.0f} MB/s"
    ]
    if native:
        lines.append(f"below {native // 1024} KiB: native")
    if nodes == 1:
        lines.append(f"from {native // 1024} KiB: shared_memory")
    else:
        limit = ring_from_bytes(profile, nodes, lanes) * lanes
        inside = "" if len(set(world.node_ranks)) == world.size else "shared memory inside each node, "
        if limit > native:
            lines.append(f"from {native // 1024} KiB: {inside}direct between nodes")
        lines.append(f"from {max(limit, native) // 1024} KiB: {inside}ring between nodes")
        order = [world.hosts[rank] for rank in everyone(world).members]
        lines.append(f"ring: {' '.join(dict.fromkeys(order))}")
        lines.append(f"predicted for 16 MiB: {seconds('ring', 2**24 // lanes, profile, nodes, lanes) * 1e3:.1f} ms")
    lines.append(f"buckets: {world.config.bucket_mib or bucket_bytes(profile, nodes) / 2**20:g} MiB")
    return lines
