"""shared_memory: ranks of one node add up their segments directly in each other's memory; nothing is sent.

Buckets live in memory that all ranks of the node see (node_memory.py). Each rank owns one segment of the buffer. It
reads that segment of everybody's buffer, adds, and writes the sum into everybody's buffer:

    rank 0's buffer   [ a0 b0 c0 d0 ]      rank 0 reads a0 a1 a2 a3, writes A four times
    rank 1's buffer   [ a1 b1 c1 d1 ]      rank 1 reads b0 b1 b2 b3, writes B four times
    rank 2's buffer   [ a2 b2 c2 d2 ]      ...
    rank 3's buffer   [ a3 b3 c3 d3 ]

    meet: all have filled their buffers  -->  add and write  -->  meet: all sums are written

The work goes in blocks that stay in a core's cache, so memory is read once and written once. There are no extra copies.

Four ranks with 1 2 3 4, 10 20 30 40, 100 200 300 400, 1000 2000 3000 4000: rank 0 adds up 1 + 10 + 100 + 1000, rank 1
adds up 2 + 20 + 200 + 2000, and so on; all have 1111 2222 3333 4444.

Cost a rank: N bytes read, N written, 2 log2(p) empty messages. Every sum is made by one rank in rank order and copied
from there: the same bits on every rank.

A buffer in other memory is processed through a shared slab, piece by piece. Each rank copies in the segments that the
others own, adds the segment that it owns to its own buffer, copies that sum in, and copies out the others' sums. That
adds copies of 2 (p-1)/p N bytes, and of N/p. Pieces alternate between the two halves of the slab, so that no rank
overwrites what another rank is still copying out: after two further barriers, a rank knows that the others have
finished that copy.

Source: the layout is the shared-memory reduction of Jain, Kaleem, Balmana, Langer, Durnov, Sannikov and Garzaran,
Framework for scalable intra-node collective operations using shared memory, SC 2018, with the buckets themselves as the
shared buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy

from mpitrain.allreduce.algorithm import AddAll, Halves, Progress, Sequential, Steps, in_phases
from mpitrain.allreduce.costs import Topology, inside_seconds
from mpitrain.allreduce.group import Group, of_this_node
from mpitrain.allreduce.node_memory import NodeMemory, meet
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, everywhere
from mpitrain.watching.activity import count_moved
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

_BLOCK_BYTES = 128 * 1024
_SLAB_BYTES = 4 * 2**20

# Sums the block of all arrays into that of the last argument, which is one of them.
AddBlock: TypeAlias = Callable[[list[numpy.ndarray], slice, numpy.ndarray], None]


def add_block(arrays: list[numpy.ndarray], block: slice, into: numpy.ndarray) -> None:
    """Sum all arrays' `block`, in their order, into `into`, which is one of them."""
    with numpy.errstate(all="ignore"):
        if len(arrays) == 1:
            return
        if into is arrays[0] or len(arrays) == 2:
            numpy.add(arrays[0][block], arrays[1][block], out=into[block])
            for other in arrays[2:]:
                numpy.add(into[block], other[block], out=into[block])
            return
        total = arrays[0][block] + arrays[1][block]
        for other in arrays[2:]:
            numpy.add(total, other[block], out=total)
        into[block] = total


def shared_memory(world: World) -> Sequential:
    """For worlds on one node. See Algorithm for the contract.

    Raises:
        ConfigError: the ranks are on several nodes.
    """
    _refuse_nodes(world)
    memory = NodeArrays(world)
    return Sequential(world, "shared_memory", shared_memory_steps(memory), memory)


def shared_memory_seen(world: World, add_all: AddAll) -> Sequential:
    """The same, with the addition given. Raises as shared_memory does."""
    _refuse_nodes(world)
    memory = NodeArrays(world)

    def add(arrays: list[numpy.ndarray], block: slice, into: numpy.ndarray) -> None:
        add_all([array[block] for array in arrays], into[block])

    return Sequential(world, "shared_memory", shared_memory_steps(memory, add), memory)


def shared_memory_seconds(num_bytes: int, topology: Topology) -> float:
    """The cost on one node: each rank adds its segment, and hands the sum to all others."""
    return inside_seconds(num_bytes, topology) if topology.num_nodes == 1 else math.inf


def shared_memory_steps(memory: NodeArrays, add_block: AddBlock = add_block) -> Steps:
    """The algorithm for arrays in `memory`; other arrays go through a slab, piece by piece."""
    mates = memory.mates

    @in_phases
    def add(arrays: list[numpy.ndarray]) -> Iterator[Progress]:
        yield meet(mates)
        own = part_of(len(arrays[0]), mates.index, mates.size)
        for block in blocks(own, arrays[0].itemsize):
            add_block(arrays, block, arrays[0])
            for other in arrays[1:]:
                other[block] = arrays[0][block]
        yield meet(mates)

    @in_phases
    def add_elsewhere(part: numpy.ndarray, slabs: list[numpy.ndarray]) -> Iterator[Progress]:
        segments = [part_of(part.size, index, mates.size) for index in range(mates.size)]
        others = [index for index in range(mates.size) if index != mates.index]
        for index in others:
            slabs[mates.index][segments[index]] = part[segments[index]]
        yield meet(mates)
        arrays = list(slabs)
        arrays[mates.index] = part
        for block in blocks(segments[mates.index], part.itemsize):
            add_block(arrays, block, part)
            slabs[mates.index][block] = part[block]
        yield meet(mates)
        for index in others:
            part[segments[index]] = slabs[index][segments[index]]

    @in_phases
    def steps(flat: numpy.ndarray, _: numpy.ndarray | None = None) -> Iterator[Progress]:
        arrays = memory.everyones(flat)
        if arrays is not None:
            yield add(arrays)
            return
        yield memory.make_slab()
        count = _SLAB_BYTES // 2 // flat.itemsize
        for piece in _pieces(0, flat.size, count):
            part = flat[piece]
            yield add_elsewhere(part, memory.half_slabs(part))

    return steps


def shared_memory_halves(world: World) -> Halves:
    """Rank r has part r: it reads that part of every rank's array. For worlds on one node, and arrays in its memory.

    Raises:
        ConfigError: the ranks are on several nodes.
    """
    _refuse_nodes(world)
    memory = NodeArrays(world)
    mates = memory.mates

    def own(count: int, rank: int) -> slice:
        return part_of(count, rank, mates.size)

    @in_phases
    def reduce_scatter(flat: numpy.ndarray) -> Iterator[Progress]:
        yield meet(mates)
        memory.add_own(flat, own(flat.size, mates.index))
        yield meet(mates)  # nobody reads any more

    def allgather(flat: numpy.ndarray) -> Progress:
        return memory.take_others(flat, [own(flat.size, index) for index in range(mates.size)])

    return Halves("shared_memory", reduce_scatter, allgather, own, memory)


class NodeArrays:
    """Flat arrays in memory that the ranks of this node share."""

    def __init__(self, world: World) -> None:
        self.mates: Group = of_this_node(world)
        self._memory = NodeMemory(self.mates)
        self._world = world
        # Equal on all nodes, so that all cut a buffer into the same pieces for the slab.
        self._is_shared = len(set(world.node_ranks)) < world.size
        self._slab: numpy.ndarray | None = None  # made for the first buffer that is not shared
        self._turn = 0  # which half is next

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm."""
        if not self._is_shared:
            return numpy.empty(count, dtype)
        made: list[numpy.ndarray] = []

        def steps() -> Progress:
            made.append((yield from self._memory.allocate(count * dtype.itemsize)))

        self._world.control.wait(steps(), "share memory with the ranks of this node")
        return made[0].view(dtype)

    def holds(self, flat: Array) -> bool:
        """True if the ranks of this node share the array."""
        return self._is_shared and self._memory.find(flat) is not None

    def everyones(self, flat: numpy.ndarray) -> list[numpy.ndarray] | None:
        """Return the same place in the memory of every rank of the node; None if they do not share the array."""
        return self._memory.find(flat) if self._is_shared else [flat]

    def add_own(self, flat: numpy.ndarray, part: slice) -> None:
        """Put the sum of that part of all arrays of the node into it, between two meetings."""
        arrays = self._shared_arrays(flat)
        for block in blocks(part, flat.itemsize):
            add_block(arrays, block, flat)

    @in_phases
    def take_others(self, flat: numpy.ndarray, parts: Sequence[slice]) -> Iterator[Progress]:
        """Copy each rank's part, by its place on the node, from the array of that rank."""
        arrays = self._shared_arrays(flat)
        yield meet(self.mates)  # all have filled their parts
        for index, part in enumerate(parts):
            if index != self.mates.index:
                for block in blocks(part, flat.itemsize):
                    flat[block] = arrays[index][block]
        yield meet(self.mates)  # nobody reads any more

    def _shared_arrays(self, flat: numpy.ndarray) -> list[numpy.ndarray]:
        arrays = self.everyones(flat)
        if arrays is None:
            raise ValueError("the halves of shared_memory and hierarchical work on arrays that their memory allocates")
        return arrays

    def make_slab(self) -> Progress:
        """Make the slab if there is none yet: work of all ranks of the node."""
        if self._slab is None:
            self._slab = yield from self._memory.allocate(_SLAB_BYTES)

    def half_slabs(self, part: numpy.ndarray) -> list[numpy.ndarray]:
        """Return every rank's half of the slab, alternating, as long as `part`."""
        assert self._slab is not None
        self._turn ^= 1
        half = self._slab[self._turn * _SLAB_BYTES // 2 :][: part.nbytes].view(part.dtype)
        return self._find_all(half)

    def steps(self, work: Callable[[list[numpy.ndarray], numpy.ndarray | None], Progress]) -> Steps:
        """Turn `work` on one place of all ranks' arrays into steps on any array: unshared arrays go through a slab."""

        @in_phases
        def steps(flat: numpy.ndarray, residual: numpy.ndarray | None = None) -> Iterator[Progress]:
            arrays = self.everyones(flat)
            if arrays is not None:
                yield work(arrays, residual)
                return
            yield self.make_slab()
            assert self._slab is not None
            count = _SLAB_BYTES // flat.itemsize
            for piece in _pieces(0, flat.size, count):
                part = flat[piece]
                slab = self._slab.view(flat.dtype)[: part.size]
                slab[:] = part
                yield work(self._find_all(slab), None if residual is None else residual[piece])
                part[:] = slab

        return steps

    def _find_all(self, slab: numpy.ndarray) -> list[numpy.ndarray]:
        shared = self._memory.find(slab)
        assert shared is not None
        return shared


def _refuse_nodes(world: World) -> None:
    if world.num_nodes > 1:
        raise everywhere(
            ConfigError(
                f"the algorithm shared_memory is for ranks on one node; these ranks are on {world.num_nodes} nodes. "
                "Use hierarchical between nodes"
            )
        )


def blocks(part: slice, itemsize: int) -> Iterator[slice]:
    """`part` in pieces that stay in a core's cache while they are added up."""
    return _pieces(part.start, part.stop, _BLOCK_BYTES // itemsize)


def _pieces(start: int, stop: int, count: int) -> Iterator[slice]:
    """Count from `start` to `stop` by `count`. Each finished block except the last counts as progress."""
    for begin in range(start, stop, count):
        yield slice(begin, min(begin + count, stop))
        if begin + count < stop:
            count_moved()
