"""A simulated rank posts the messages that a real one posts, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy
import pytest
from mpi4py import MPI

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Steps
from mpitrain.allreduce.compressed import gathered_steps
from mpitrain.allreduce.direct import direct_steps
from mpitrain.allreduce.group import everyone
from mpitrain.allreduce.hierarchical import between_nodes, hierarchical_steps
from mpitrain.allreduce.native import native_steps
from mpitrain.allreduce.shared_memory import NodeArrays, shared_memory_steps
from mpitrain.compression import make_codec
from mpitrain.forecast.events import Events, Network
from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.sums import flat_buffer, make_sums

# From nothing but empty messages to several pieces a segment.
LENGTHS = (1, 2, 7, 1000, 100_003, 700_001)
OVER_GROUPS = sorted(name for name, entry in ALGORITHMS.items() if entry.over not in (None, native_steps))


class CountingComm:
    """A communicator that notes what is sent."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.sent: list[tuple[int, int, int]] = []
        self._comm = comm

    def Isend(self, array: numpy.ndarray, target: int, tag: int) -> MPI.Request:  # noqa: N802 - MPI's name
        self.sent.append((target, tag, array.nbytes))
        return self._comm.Isend(array, target, tag)

    def Irecv(self, array: numpy.ndarray, source: int, tag: int) -> MPI.Request:  # noqa: N802 - MPI's name
        return self._comm.Irecv(array, source, tag)


@pytest.mark.parametrize("name", OVER_GROUPS)
def test_between_nodes(world: World, name: str) -> None:
    there = alone_on_nodes(world)

    def make(counted: World) -> Steps:
        over = ALGORITHMS[name].over
        assert over is not None
        return over(everyone(counted))

    check(there, name, "none", make)


@pytest.mark.parametrize("codec", ["int8", "int4", "top_k:0.1"])
def test_with_a_codec(world: World, codec: str) -> None:
    """Real values decide nothing of what is sent."""
    real = make_codec(codec)
    between = gathered_steps if real.gathered else direct_steps

    def make(counted: World) -> Steps:
        return hierarchical_steps(counted, NodeArrays(counted), lambda group: between(group, real))

    check(alone_on_nodes(world), "auto", codec, make)


def test_on_one_node(world: World) -> None:
    memories: list[NodeArrays] = []

    def make(counted: World) -> Steps:
        memories.append(NodeArrays(counted))
        return shared_memory_steps(memories[-1])

    check(world, "shared_memory", "none", make, memories)


def test_two_ranks_on_a_node(world: World) -> None:
    """With an odd number of ranks, the last node has one, and the others one lane."""
    memories: list[NodeArrays] = []

    def make(counted: World) -> Steps:
        memories.append(NodeArrays(counted))
        return hierarchical_steps(counted, memories[-1], between_nodes(counted))

    pairs = world.replaced(node_ranks=tuple(rank // 2 for rank in range(world.size)))
    check(pairs, "hierarchical", "none", make, memories)


def alone_on_nodes(world: World) -> World:
    return world.replaced(node_ranks=tuple(range(world.size)))


def check(
    there: World, name: str, codec: str, make: Callable[[World], Steps], memories: list[NodeArrays] | None = None
) -> None:
    """Each rank's list: target, tag, bytes, in the order of the posts for one target and tag."""
    comm = CountingComm(there.comm)
    steps = make(there.replaced(comm=cast(MPI.Comm, comm)))
    for length in LENGTHS:
        float32 = numpy.dtype(numpy.float32)
        flat: Any = memories[0].allocate(length, float32) if memories else numpy.empty(length, float32)
        flat[:] = numpy.arange(length) % 11 + there.rank
        comm.sent.clear()
        if there.size > 1:
            there.control.wait(steps(flat), "a sum that is counted")
        size = there.size
        assert codec != "none" or flat[0] == size * (size - 1) / 2  # it was a sum
        simulated = simulate(there, name, codec, length)
        assert by_way(comm.sent) == by_way(simulated), length
        assert (len(comm.sent) > 0) == (size > 1)


def simulate(there: World, name: str, codec: str, length: int) -> list[tuple[int, int, int]]:
    """What this rank would send."""
    per_node = there.node_ranks.count(0)
    machines = equal_machines(there.num_nodes, ranks_per_node=per_node)
    machines = replace(
        machines,
        costs=there.profile,
        link_bytes_per_second=(there.profile.bytes_per_second,) * there.num_nodes,
        latency_seconds=there.profile.latency_seconds,
    )
    events = Events(Network(machines, there.node_ranks), there.size, records=True)
    flat = flat_buffer(events, machines, length)
    if there.size > 1:
        events.run([steps(flat) for steps in make_sums(events, machines, there.node_ranks, name, codec)])
    assert events.sent is not None
    return [(target, tag, nbytes) for source, target, tag, nbytes in events.sent if source == there.rank]


def by_way(sent: list[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    ways: dict[tuple[int, int], list[int]] = {}
    for target, tag, nbytes in sent:
        ways.setdefault((target, tag), []).append(nbytes)
    return ways
