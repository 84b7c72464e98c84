"""The allreduce algorithms of mpitrain on simulated ranks.

They are made for a World, of which they use few attributes. SimulatedWorld has these. What no message carries is
replaced: shared memory of a node, and the work of a codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy

from mpitrain.allreduce import ALGORITHMS, check_name
from mpitrain.allreduce.algorithm import Steps
from mpitrain.allreduce.costs import topology_of
from mpitrain.allreduce.direct import direct_steps
from mpitrain.allreduce.gathered import gathered_steps
from mpitrain.allreduce.group import Group, everyone
from mpitrain.allreduce.hierarchical import between_nodes, hierarchical_steps
from mpitrain.allreduce.registry import by_cost, candidates
from mpitrain.allreduce.shared_memory import NodeArrays, shared_memory_steps
from mpitrain.compression import CODECS, factory_of
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError
from mpitrain.profile import DEFAULT, Profile
from mpitrain.simulate.events import Events
from mpitrain.simulate.machines import Machines
from mpitrain.simulate.transport import SimulatedComm, without_contents
from mpitrain.world import World


@dataclass(frozen=True)
class SimulatedWorld:
    """What algorithms use of a World; see World."""

    comm: SimulatedComm
    rank: int
    size: int
    hosts: tuple[str, ...]
    node_ranks: tuple[int, ...]
    num_nodes: int
    profile: Profile

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self.node_ranks[self.rank]


class SimulatedNodeArrays(NodeArrays):
    """Arrays without contents are in the memory of every rank of the node."""

    def everyones(self, flat: numpy.ndarray) -> list[numpy.ndarray]:
        """See NodeArrays."""
        return [flat] * self.mates.size


class SimulatedCodec:
    """A codec that takes as many bytes and as much time as the real one.

    A profile has the time of encoding, adding and decoding together; each takes a third of it. It has one rate for all
    settings of a codec.
    """

    def __init__(self, name: str, codecs: Sequence[tuple[str, float]], events: Events) -> None:
        codec = factory_of(name)(False)
        self.name = name
        self.gathered = codec.gathered
        self.wire_bytes = lru_cache(codec.wire_bytes)
        rate = dict(codecs).get(name.partition(":")[0])
        self._seconds_per_byte = 0.0 if rate is None else 1 / rate / 3
        self._events = events

    def encode(self, values: numpy.ndarray, _wire: numpy.ndarray, _error: numpy.ndarray | None = None) -> None:
        """See Codec."""
        self._take(values)

    def decode(self, _wire: numpy.ndarray, values: numpy.ndarray) -> None:
        """See Codec."""
        self._take(values)

    def add(self, _wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """See Codec."""
        self._take(total)

    def _take(self, values: numpy.ndarray) -> None:
        self._events.running.clock += values.nbytes * self._seconds_per_byte


def check_sum(name: str, codec: str, num_nodes: int, costs: Profile = DEFAULT) -> None:
    """Raise ConfigError if sums by this algorithm, with this codec between nodes, cannot be simulated there.

    `costs`: see Machines. Without a measured profile, a codec takes no time.
    """
    check_name(name)
    if name == "native":
        raise ConfigError(
            "the algorithm native is MPI's own allreduce, and its messages are the library's secret; simulate another "
            f"one: {', '.join(sorted(set(ALGORITHMS) - {'native'}))}"
        )
    if name == "shared_memory" and num_nodes > 1:
        raise ConfigError(f"the algorithm shared_memory is for ranks on one node; these are on {num_nodes} nodes")
    if codec == "none":
        return
    if codec.partition(":")[0] not in CODECS:
        raise ConfigError(f"the codec {codec!r} cannot be simulated; known: none, {', '.join(sorted(CODECS))}")
    factory_of(codec)  # raises if its setting is not allowed
    plain = codec.partition(":")[0]
    if num_nodes > 1 and costs.is_measured and plain not in dict(costs.codecs):
        known = ", ".join(name for name, _ in costs.codecs) or "no codec"
        raise ConfigError(
            f"the profile {costs.origin} has no time of the codec {plain}, only of: {known}. Measure it again with "
            "`mpitrain bench --save-profile`, or take another codec"
        )
    if name != "auto":
        raise ConfigError(
            f"with the codec {codec}, the codec decides how gradients travel between nodes; leave out "
            f"--algorithms {name}"
        )


def make_sums(events: Events, machines: Machines, node_of: Sequence[int], name: str, codec: str) -> list[Steps]:
    """Make the steps of each rank's sum of a float32 buffer, as the exchange makes them in a job.

    `auto` leaves out native, which it takes in a job for short buffers.

    Args:
        node_of: the node of each rank.
        name: of the algorithm.
        codec: between nodes; "none": no codec.

    Raises:
        ConfigError: see check_sum.
    """
    num_nodes = max(node_of) + 1
    check_sum(name, codec, num_nodes, machines.costs)
    profile = machines.profile(num_nodes)
    worlds = _worlds(events, machines, node_of)
    groups = _groups(worlds)
    topology = topology_of(cast(World, worlds[0]))
    names = [one for one in candidates(topology) if one != "native"] if name == "auto" else [name]
    coded = None if codec == "none" or num_nodes == 1 else SimulatedCodec(codec, profile.codecs, events)

    def steps_of(world: SimulatedWorld, one: str) -> Steps:
        over = ALGORITHMS[one].over
        if over is not None:
            return over(groups[world.rank])
        own = cast(World, world)
        memory = SimulatedNodeArrays(own)
        if one == "shared_memory":
            return shared_memory_steps(memory)
        return hierarchical_steps(own, memory, between_nodes(own))

    def coded_steps(world: SimulatedWorld, with_codec: SimulatedCodec) -> Steps:
        own, real = cast(World, world), cast(Codec, with_codec)
        between = gathered_steps if real.gathered else direct_steps
        return hierarchical_steps(own, SimulatedNodeArrays(own), lambda group: between(group, real))

    if coded is not None:
        return [coded_steps(world, coded) for world in worlds]
    return [by_cost(topology, {one: steps_of(world, one) for one in names}) for world in worlds]


def flat_buffer(events: Events, machines: Machines, count: int) -> numpy.ndarray:
    """Make a float32 buffer without contents that every rank may hand to its sum.

    An addition takes the running rank the time of the machines' memory, and so does a copy.
    """
    costs = machines.costs

    def added(num_bytes: int) -> None:
        events.running.clock += num_bytes / costs.add_bytes_per_second

    def copied(num_bytes: int) -> None:
        events.running.clock += num_bytes / costs.copy_bytes_per_second

    return without_contents(count, numpy.dtype(numpy.float32), added, copied)


def simulated_groups(events: Events, machines: Machines, node_of: Sequence[int]) -> list[Group]:
    """All ranks in the order in which an algorithm over a group takes them, as the member of each place has them."""
    groups = _groups(_worlds(events, machines, node_of))
    return [groups[rank] for rank in groups[0].members]


def _worlds(events: Events, machines: Machines, node_of: Sequence[int]) -> list[SimulatedWorld]:
    num_nodes = max(node_of) + 1
    hosts, profile = tuple(machines.hosts[node] for node in node_of), machines.profile(num_nodes)
    return [
        SimulatedWorld(
            SimulatedComm(events, rank, len(node_of)), rank.number, len(node_of), hosts, tuple(node_of), num_nodes,
            profile,
        )
        for rank in events.ranks
    ]  # fmt: skip


def _groups(worlds: Sequence[SimulatedWorld]) -> dict[int, Group]:
    """See everyone(). The order is the same for all, and found once."""
    members = everyone(cast(World, worlds[0])).members
    places = {rank: place for place, rank in enumerate(members)}
    return {
        world.rank: Group(world.comm, members, places[world.rank])  # type: ignore[arg-type]
        for world in worlds
    }
