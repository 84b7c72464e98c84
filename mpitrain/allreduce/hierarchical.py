"""hierarchical: add up inside each node, then between nodes, so that each byte crosses the network once per node.

Ranks 0 and 2 are on node A, 1 and 3 on node B, as `mpiexec -n 4 -ppn 1 -hosts A,B` places them. The buffer has as many
segments as the smallest node has ranks. A lane is one rank of every node, and handles one segment:

    node A                              node B
    rank 0  [ a0 b0 ]                   rank 1  [ a1 b1 ]
    rank 2  [ a2 b2 ]                   rank 3  [ a3 b3 ]
    1. add up in the node, each rank its segment, out of each other's memory
    rank 0  [ a02 .  ]                  rank 1  [ a13 .  ]
    rank 2  [ .  b02 ]                  rank 3  [ .  b13 ]
    2. allreduce in each lane: ranks 0 and 1 for a, ranks 2 and 3 for b, at the same time
    rank 0  [ A   .  ]  <-- network --> rank 1  [ A   .  ]
    rank 2  [ .   B  ]  <-- network --> rank 3  [ .   B  ]
    3. each rank writes its segment into the others' memory
    all     [ A   B  ]

Worked: 1 2, 10 20, 100 200, 1000 2000 on ranks 0 to 3. After step 1 rank 0 has a = 101, rank 2 b = 202, rank 1
a = 1010, rank 3 b = 2020; after step 2 a = 1111 and b = 2222 on both nodes; after step 3 everywhere.

Cost of a node with L ranks, m nodes: 2(m-1)/m N bytes through its network card, while a ring over all ranks, placed as
above, sends 2(p-1)/p N for every one of its L ranks; in memory, the cost of shared_memory. Ranks beyond the smallest
node's number have no lane: they only contribute and receive.

Between nodes, any algorithm over a group works: for each size, the one with the lowest predicted time (registry.py).
With a codec the algorithm is direct, and the lane's rank keeps the residual. Each segment's sum is made in
one place and copied from there.

Source: Jia et al., Highly scalable deep learning training system with mixed-precision, arXiv:1807.11205, section 3.3,
with all ranks of a node taking part between nodes instead of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy

from mpitrain.allreduce.algorithm import Halves, Progress, Sequential, Steps, in_phases
from mpitrain.allreduce.costs import Topology, inside_seconds, topology_of
from mpitrain.allreduce.group import Group, lane, num_lanes, ranks_by_node
from mpitrain.allreduce.node_memory import meet
from mpitrain.allreduce.registry import ALGORITHMS, by_cost, candidates, cheapest, priced
from mpitrain.allreduce.shared_memory import NodeArrays, add_block, blocks
from mpitrain.world.shard import part_of
from mpitrain.world.world import World


def hierarchical(world: World) -> Sequential:
    """Shared memory in the nodes, the fastest algorithm over a group between them. See Algorithm for the contract."""
    memory = NodeArrays(world)
    return Sequential(world, "hierarchical", hierarchical_steps(world, memory, between_nodes(world)), memory)


def hierarchical_seconds(num_bytes: int, topology: Topology) -> float:
    """The cost on several nodes: shared_memory inside each node, and the fastest group algorithm between nodes."""
    if topology.num_nodes == 1:
        return math.inf
    lane = topology.between_nodes()
    between, _ = cheapest(num_bytes // lane.lanes, lane, priced(lane))
    return inside_seconds(num_bytes, topology) + between


def hierarchical_steps(world: World, memory: NodeArrays, make_between: Callable[[Group], Steps]) -> Steps:
    """`make_between` makes the algorithm that runs between the nodes, over a lane."""
    mates, lanes, group = memory.mates, num_lanes(world), lane(world)
    between = make_between(group) if group is not None and group.size > 1 else None

    @in_phases
    def add(arrays: list[numpy.ndarray], residual: numpy.ndarray | None) -> Iterator[Progress]:
        yield meet(mates)
        if group is not None:
            own = arrays[mates.index]
            part = part_of(own.size, mates.index, lanes)
            for block in blocks(part, own.itemsize):
                add_block(arrays, block, own)
            if between is not None and part.stop > part.start:
                yield between(own[part], None if residual is None else residual[part])
            for index, other in enumerate(arrays):
                if index != mates.index:
                    other[part] = own[part]
        yield meet(mates)

    return memory.steps(add)


def hierarchical_halves(world: World) -> Halves:
    """Add up in the node, then scatter in each lane; gather in each lane, then copy in the node.

    A rank's part is its node's part of its lane's segment. A rank beyond the smallest node's number has no part.
    Arrays are in the memory of the halves.
    """
    memory = NodeArrays(world)
    mates, lanes, group, nodes = memory.mates, num_lanes(world), lane(world), ranks_by_node(world)
    scatter, gather = _between_halves(world, group) if group is not None else (None, None)

    def segment(count: int, index: int) -> slice:
        return part_of(count, index, lanes) if index < lanes else slice(0, 0)

    def own(count: int, rank: int) -> slice:
        node = next(place for place, ranks in enumerate(nodes) if rank in ranks)
        whole = segment(count, nodes[node].index(rank))
        part = part_of(whole.stop - whole.start, node, len(nodes))
        return slice(whole.start + part.start, whole.start + part.stop)

    @in_phases
    def reduce_scatter(flat: numpy.ndarray) -> Iterator[Progress]:
        part = segment(flat.size, mates.index)
        yield meet(mates)
        memory.add_own(flat, part)
        yield meet(mates)  # nobody reads any more
        if scatter is not None and part.stop > part.start:
            yield scatter(flat[part])

    @in_phases
    def allgather(flat: numpy.ndarray) -> Iterator[Progress]:
        part = segment(flat.size, mates.index)
        if gather is not None and part.stop > part.start:
            yield gather(flat[part])
        yield memory.take_others(flat, [segment(flat.size, index) for index in range(mates.size)])

    return Halves("hierarchical", reduce_scatter, allgather, own, memory)


def _between_halves(world: World, group: Group) -> tuple[Callable[[numpy.ndarray], Progress], ...]:
    """Both halves over a lane, of the fastest algorithm with halves for a segment's number of bytes."""
    topology = topology_of(world).between_nodes()
    entries = {name: entry for name, entry in ALGORITHMS.items() if entry.reduce_scatter and entry.seconds}
    made = {
        name: tuple(make(group) for make in (entry.reduce_scatter, entry.allgather) if make is not None)
        for name, entry in entries.items()
    }
    return tuple(lambda flat, half=half: made[cheapest(flat.nbytes, topology, made)[1]][half](flat) for half in (0, 1))


def between_nodes(world: World) -> Callable[[Group], Steps]:
    """Make the steps over a lane: of all algorithms over a group, the fastest for a buffer's number of bytes."""
    topology = topology_of(world).between_nodes()
    names = candidates(topology)

    def make(group: Group) -> Steps:
        makers = {name: ALGORITHMS[name].over for name in names}
        return by_cost(topology, {name: over(group) for name, over in makers.items() if over is not None})

    return make
