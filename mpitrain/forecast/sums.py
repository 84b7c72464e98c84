"""The allreduce algorithms of mpitrain on simulated ranks.

They are made for a World, of which they use few attributes. SimulatedWorld has these, with a communicator in simulated
time and arrays without contents. The parts that send no messages are replaced: shared memory of a node, and the work of
a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy

from mpitrain.allreduce import ALGORITHMS, check_name
from mpitrain.allreduce.algorithm import Steps
from mpitrain.allreduce.compressed import gathered_steps
from mpitrain.allreduce.costs import topology_of
from mpitrain.allreduce.direct import direct_steps
from mpitrain.allreduce.group import Group, everyone
from mpitrain.allreduce.hierarchical import between_nodes, hierarchical_steps
from mpitrain.allreduce.registry import by_cost, candidates
from mpitrain.allreduce.shared_memory import NodeArrays, shared_memory_steps
from mpitrain.compression import CODECS, factory_of
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError
from mpitrain.forecast.events import Events, Pending, SimulatedRank
from mpitrain.forecast.machines import Machines
from mpitrain.profile import DEFAULT, Profile
from mpitrain.world.world import World


class SimulatedComm:
    """What an algorithm uses of an MPI.Comm: its calls take the same arguments, and post messages in simulated time.

    Attributes:
        rank, size: as of an MPI.Comm.
    """

    def __init__(self, events: Events, rank: SimulatedRank, size: int) -> None:
        self.rank = rank.number
        self.size = size
        self._events = events
        self._own = rank

    def Isend(self, array: numpy.ndarray, target: int, tag: int) -> Pending:  # noqa: N802 - MPI's name
        """Post a message of as many bytes as `array` has."""
        return self._events.send(self._own, target, tag, array.nbytes)

    def Irecv(self, array: numpy.ndarray, source: int, tag: int) -> Pending:  # noqa: N802 - MPI's name
        """Post the receive of the next message from `source` with this tag; `array` has as many bytes."""
        return self._events.receive(self._own, source, tag, array.nbytes)


def without_contents(
    count: int, dtype: numpy.dtype, added: Callable[[int], None], copied: Callable[[int], None]
) -> numpy.ndarray:
    """Make a flat array for which additions and copies are only counted.

    It is one element, which stands for all. So it takes no memory, however long it is, and all ranks may share it.

    Args:
        count: elements.
        dtype: any.
        added, copied: called with the number of bytes that an addition or an assignment would write.
    """

    class WithoutContents(numpy.ndarray):
        """One element, again and again. Slices and views of it are of this class too."""

        def view(self, dtype: Any) -> WithoutContents:  # type: ignore[override]
            """As of an array whose elements lie side by side."""
            other = numpy.dtype(dtype)
            return of_one(self.nbytes // other.itemsize, other)

        def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
            (result,) = kwargs.get("out") or [one for one in inputs if isinstance(one, WithoutContents)][:1]
            added(result.nbytes)
            return result

        def __setitem__(self, key: Any, _value: Any) -> None:
            copied(self[key].nbytes)

    def of_one(count: int, dtype: numpy.dtype) -> WithoutContents:
        return WithoutContents((count,), dtype, bytearray(dtype.itemsize), 0, (0,))

    return of_one(count, dtype)


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
            "the algorithm native is MPI's own allreduce, and its messages are not known; simulate another "
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
    """Make a float32 buffer without contents that every rank may pass to its sum.

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
