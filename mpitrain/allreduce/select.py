"""auto: the algorithm with the lowest predicted time for each size."""

from __future__ import annotations

from mpitrain.allreduce.algorithm import AddAll, Halves, Sequential
from mpitrain.allreduce.costs import bucket_bytes, compression, topology_of
from mpitrain.allreduce.direct import direct_seen
from mpitrain.allreduce.group import everyone, num_lanes
from mpitrain.allreduce.hierarchical import hierarchical_halves
from mpitrain.allreduce.registry import ALGORITHMS, by_cost, candidates, changes, cheapest, priced
from mpitrain.allreduce.shared_memory import shared_memory_halves, shared_memory_seen
from mpitrain.compression import CODECS
from mpitrain.world.world import World


def auto(world: World) -> Sequential:
    """The fastest algorithm for a buffer's number of bytes. See Algorithm for the contract."""
    topology = topology_of(world)
    made = {name: ALGORITHMS[name].make(world) for name in candidates(topology)}
    # At most one of them has its own memory: shared_memory and hierarchical use the node's memory.
    memory = next((algorithm.memory for algorithm in made.values() if algorithm.memory is not None), None)
    return Sequential(world, "auto", by_cost(topology, {name: made[name].steps for name in made}), memory)


def auto_halves(world: World) -> Halves:
    """The halves that send the fewest bytes over the network: shared memory inside nodes. Collective."""
    return (shared_memory_halves if world.num_nodes == 1 else hierarchical_halves)(world)


def auto_seen(world: World, add_all: AddAll) -> Sequential | None:
    """Shared memory on one node, direct between nodes with one rank each. Otherwise the nodes' sums must travel."""
    if world.num_nodes == 1:
        return shared_memory_seen(world, add_all)
    return direct_seen(world, add_all) if world.num_nodes == world.size else None


def choices(world: World) -> list[str]:
    """Describe, in lines for the user, the choices in this world by its settings and its profile."""
    profile, config = world.profile, world.config
    lines = [
        f"profile: {profile.origin}; {profile.latency_seconds * 1e6:.0f} us, {profile.bytes_per_second / 1e6:.0f} MB/s"
    ]
    if config.reduction == "exact":
        lines.append(f"floats of all sizes, as reduction is exact: {_exact(world)}; integers:")
    if config.algorithm == "auto":
        lines += _by_size(world)
    else:
        lines.append(f"all sizes: {config.algorithm}, set by MPITRAIN_ALGORITHM")
    if world.num_nodes > 1 and config.algorithm in ("auto", "hierarchical", "ring"):
        order = [world.hosts[rank] for rank in everyone(world).members]
        lines.append(f"ring: {' '.join(dict.fromkeys(order))}")
    if config.compression != "none":
        lines.append(_compression(world))
    lines.append(f"buckets: {config.bucket_mib or bucket_bytes(profile, world.num_nodes) / 2**20:g} MiB")
    return lines


def _exact(world: World) -> str:
    """Describe how floats are summed exactly. `auto` is what auto_seen and auto_halves choose."""
    name = world.config.algorithm
    if name == "auto":
        name = (
            "shared_memory" if world.num_nodes == 1 else "direct" if world.num_nodes == world.size else "hierarchical"
        )
    return name if ALGORITHMS[name].seen is not None else f"{name}, in words of 64 bits"


def _by_size(world: World) -> list[str]:
    topology = topology_of(world)
    names, lane = priced(topology), topology.between_nodes()
    inside = "" if lane.num_nodes == world.size else "shared memory inside each node, "

    def choice(num_bytes: int) -> str:
        name = cheapest(num_bytes, topology, names)[1]
        if name != "hierarchical":
            return name
        return f"{inside}{cheapest(num_bytes // lane.lanes, lane, priced(lane))[1]} between nodes"

    ranges = changes(choice)
    lines = [f"from {begin // 1024} KiB: {text}" for begin, text in ranges]
    if len(ranges) > 1 and ranges[0][1] in ALGORITHMS:
        lines[0] = f"below {ranges[1][0] // 1024} KiB: {ranges[0][1]}"
    if lane.num_nodes > 1 or world.profile.is_measured:
        lines.append(f"predicted for 16 MiB: {cheapest(2**24, topology, names)[0] * 1e3:.1f} ms")
    return lines


def _compression(world: World) -> str:
    """Describe the compression of gradients; the algorithm is for all other sums."""
    name = world.config.compression
    if name == "auto" and world.config.reduction == "exact":
        return "compression auto: none; reduction=exact sends gradients as they are"
    if world.num_nodes == 1:
        return f"compression {name}: none, as all ranks are on one node"
    chosen = compression(world.profile, world.num_nodes, num_lanes(world)) if name == "auto" else name
    said = f"compression {name}: {chosen}" if name == "auto" else f"compression {name}"
    # Not by all strategies: local updates and PyTorch loops use the setting described before.
    later = "; mt.Sync and mt.AutoSync choose while they train" if name == "auto" else ""
    kind = chosen.partition(":")[0]
    if kind in CODECS:
        way = "gathered" if CODECS[kind](False).gathered else "direct"
        return f"{said}; gradients of all sizes use {way} between nodes{later}"
    if kind != "none":
        return f"{said}; its sums, of thin matrices, use the same algorithms as other sums"
    return f"{said}, as {'the profile says' if world.profile.is_measured else 'the network is not known'}{later}"
