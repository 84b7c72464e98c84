"""peer: ranks of one node add up their segments directly in each other's GPU memory; nothing goes through the CPU.

Buckets live in memory that the GPUs of the node see (cuda/peers.py): of one GPU that several ranks share, or of several
GPUs with NVLink or PCIe between them. Each rank owns one segment. It reads that segment of everybody's buffer, adds as
it reads, and writes the sum into everybody's buffer, in one pass. Nobody else touches that segment of any buffer:

    rank 0's buffer   [ a0 b0 c0 ]      rank 0 reads a0 a1 a2, writes A three times      [ A B C ]
    rank 1's buffer   [ a1 b1 c1 ]      rank 1 reads b0 b1 b2, writes B three times      [ A B C ]
    rank 2's buffer   [ a2 b2 c2 ]      rank 2 reads c0 c1 c2, writes C three times      [ A B C ]
                    filled ------------------------------------------------------> written

Worked, two ranks with 1 2 and 10 20: rank 0 reads 1 and 10 and writes 11 to both, rank 1 reads 2 and 20 and writes 22.

Before and after it each GPU waits for the others by events that are shared between processes, and each host tells the
others by a message that its event has been recorded: hosts wait for hosts, GPUs for GPUs.

Cost: of N bytes and p ranks on one GPU, 2 p N are read and written by all together; on GPUs of their own 2 (p-1)/p N go
over each link, the least that any allreduce can. p - 1 short messages a rank, and log2(p) empty ones. Every sum is
made by one rank in rank order and copied from there: the same bits on every rank.

Ranks on several nodes: each segment is summed within the node, then between the nodes by the staged transport in its
lane, as in hierarchical.py; there are as many segments as the smallest node has ranks. A buffer that lies elsewhere is
copied in and out, a slab at a time; so is one that lies in different places on different ranks.

Source: the layout is that of shared_memory.py; the calls are in the CUDA Programming Guide, Interprocess Communication.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import TypeVar

import numpy

from mpitrain.allreduce.algorithm import Progress, Steps
from mpitrain.allreduce.group import Group, lane, num_lanes, of_this_node
from mpitrain.allreduce.hierarchical import between_nodes as fastest_over
from mpitrain.allreduce.node_memory import meet
from mpitrain.arrays import Array
from mpitrain.cuda.device import cupy_module, raise_first
from mpitrain.cuda.kernels import sum_of
from mpitrain.cuda.kernels.bucket import MOST_PARTS
from mpitrain.cuda.peers import Mates, PeerMemory, exchange, make_events
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential, outlived_by, refuse
from mpitrain.cuda.staged import staged_steps
from mpitrain.errors import DeviceError
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

_TAG, _PLACE_TAG, _MEET_TAG = 50, 51, 52
SLAB_BYTES = 8 * 2**20
_NOWHERE = -1

T = TypeVar("T")


def peer(world: World, place: DevicePlace | None = None) -> DeviceSequential:
    """The sum directly from the GPU memory of the node's ranks. See Algorithm for the contract; arrays are CuPy's.

    Raises:
        DeviceError: some rank has no GPU, or cannot open the memory or the events of another one on its node; or every
            rank is alone on its node. Raised on every rank.
    """
    place = place or DevicePlace(world)

    def between_nodes(group: Group | None) -> Steps:
        return staged_steps(world, place, no_sum if group is None else fastest_over(world)(group))

    steps, allocate = peer_steps(world, place, between_nodes)
    return DeviceSequential(world, place, "peer", steps, allocate)


def peer_steps(
    world: World, place: DevicePlace, make_between: Callable[[Group | None], Steps]
) -> tuple[Steps, Callable[[int, numpy.dtype], Array]]:
    """Make the work, and the function that allocates arrays for it. Collective.

    `make_between` makes the work between nodes, over a lane; collective; None if this rank is in no lane.

    Raises as peer does.
    """
    alone = world.size > 1 and world.num_nodes == world.size
    refuse(world, "peer", "no two ranks are on one node" if alone else outlived_by(world))
    group = of_this_node(world)
    mates = Mates(group.comm, group.members, group.index, _TAG)
    memory = PeerMemory(place.gpu, mates)
    lanes = num_lanes(world)

    slab, problem = _together(world, memory.allocate(SLAB_BYTES if world.size > 1 else 1))
    refuse(world, "peer", problem)
    made, problem = _together(world, make_events(place.gpu, mates, 2))
    refuse(world, "peer", problem)
    assert slab is not None
    assert made is not None
    filled, written = made
    between = make_between(lane(world)) if world.num_nodes > 1 else None
    everyone = Mates(world.comm, tuple(range(world.size)), world.rank, _PLACE_TAG)
    runtime = cupy_module().cuda.runtime
    # The arrays are in the ranks' order, as on the host, although the kernel needs its output among the first arrays.
    order = sorted(
        range(len(mates.members)), key=lambda index: index != mates.index if mates.index >= MOST_PARTS else 0
    )

    def copy(target: Array, source: Array) -> None:
        if target.nbytes:
            runtime.memcpyAsync(
                target.data.ptr, source.data.ptr, target.nbytes, runtime.memcpyDefault, place.stream.ptr
            )

    def add(arrays: list[Array], residual: Array | None) -> Progress:
        """`arrays` is one place in every mate's buffer; this rank's own holds the sum at the end."""
        own, stream = arrays[mates.index], place.stream
        filled.record(stream)
        yield from meet(group, _MEET_TAG)
        filled.hold(stream)
        if mates.index < lanes:
            part = part_of(own.size, mates.index, lanes)
            if part.stop > part.start:
                parts = [arrays[index][part] for index in order]
                others = [arrays[index][part] for index in order if index != mates.index]
                # Do this in one pass with the sum, if this sum is the final one and one launch can take so many arrays.
                written_at_once = others if between is None and len(parts) <= MOST_PARTS else []
                if others:
                    sum_of(parts, own[part], copies=written_at_once)
                if between is not None:
                    yield from between(own[part], None if residual is None else residual[part])
                for other in others[len(written_at_once) :]:
                    copy(other, own[part])
        written.record(stream)
        yield from meet(group, _MEET_TAG)
        written.hold(stream)

    def steps(flat: Array, residual: Array | None = None) -> Progress:
        # All ranks must know where the buffer lies: they go through the slab together or not at all.
        own_place = struct.pack("qq", *memory.place_of(flat))
        places = yield from exchange(everyone, own_place)
        if set(places) == {own_place} and struct.unpack("qq", own_place)[0] != _NOWHERE:
            yield from add(memory.mates_arrays(flat), residual)
            return
        count = SLAB_BYTES // flat.itemsize
        for begin in range(0, flat.size, count):
            part = flat[begin : begin + count]
            shared = slab[: part.nbytes].view(flat.dtype)
            copy(shared, part)
            yield from add(memory.mates_arrays(shared), None if residual is None else residual[begin : begin + count])
            copy(part, shared)

    def allocate(count: int, dtype: numpy.dtype) -> Array:
        array, problem = _together(world, memory.allocate(count * dtype.itemsize))
        raise_first(world, world.allgather(problem))
        assert array is not None
        return array.view(dtype)

    return steps, allocate


def _together(world: World, work: Generator[float | None, None, T]) -> tuple[T | None, str]:
    """Return the result of work of all mates, or the reason why there is none."""
    result: list[T] = []
    problem = ""

    def steps() -> Progress:
        nonlocal problem
        try:
            result.append((yield from work))
        except DeviceError as error:
            problem = str(error)

    world.control.wait(steps(), "share GPU memory with the ranks of this node")
    return (result[0] if result else None), problem


def no_sum(_flat: Array, _residual: Array | None = None) -> Progress:
    """Between nodes, for a rank that is in no lane."""
    raise AssertionError("this rank has no lane")
