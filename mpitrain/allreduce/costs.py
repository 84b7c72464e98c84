"""The cost of a sum by the profile of a cluster, from which follow the size of buckets and whether a codec pays off.

Each algorithm's file has its own cost function (Cost); this file has the parts that they share.

    wire     2 (m-1)/m N L/B          m nodes, N bytes, link rate B, which the L lanes of a node share
    inside   (k-1)/L N (1/add + 1/copy)   k ranks of a node, of which L add a part each and hand it to the k-1 others
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from mpitrain.compression import CODECS, factory_of
from mpitrain.measured_loss import loss_with
from mpitrain.profile import Profile
from mpitrain.world.world import World

_DEFAULT_BUCKET_BYTES = 4 * 2**20
# Used if a profile has no value. Measured (benchmarks/log/): below this size, MPI's own call is faster than any
# algorithm made of messages from Python.
_NATIVE_INSIDE_BYTES, _NATIVE_BETWEEN_BYTES = 16 * 1024, 256 * 1024
_NOMINAL_VALUES = 2**20  # the choice of a codec by rates does not depend on their number
_PYTHON_SECONDS = 200e-6  # the extra time of direct over MPI's own call without latency


@dataclass(frozen=True)
class Topology:
    """The places of the ranks of a sum, and the costs of messages and memory there.

    Attributes:
        ranks_per_node: number of ranks of the sum on each node.
        lanes: number of groups like this one that share each node's link; 0: the group has all ranks of a World.
    """

    profile: Profile
    ranks_per_node: tuple[int, ...]
    lanes: int = 0

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.ranks_per_node)

    @property
    def most_ranks(self) -> int:
        """The number of ranks on the largest node."""
        return max(self.ranks_per_node)

    def between_nodes(self) -> Topology:
        """The topology of a lane: one rank of every node; there are as many lanes as ranks on the smallest node."""
        return Topology(self.profile, (1,) * self.num_nodes, min(self.ranks_per_node))


# Predicted seconds of an algorithm for a number of bytes on a topology; math.inf if the algorithm does not suit it.
Cost: TypeAlias = Callable[[int, Topology], float]


def topology_of(world: World) -> Topology:
    """The topology of all ranks."""
    return Topology(world.profile, tuple(number for _, number in sorted(Counter(world.node_ranks).items())))


def wire_seconds(num_bytes: int, topology: Topology) -> float:
    """Seconds on each node's link for the fewest bytes that an allreduce can send, with one rank per node."""
    nodes = topology.num_nodes
    return 2 * (nodes - 1) / nodes * num_bytes / _rate(topology.profile, max(topology.lanes, 1))


def inside_seconds(num_bytes: int, topology: Topology) -> float:
    """Seconds that the ranks of the largest node take to add and copy in their shared memory."""
    a_byte = 1 / topology.profile.add_bytes_per_second + 1 / topology.profile.copy_bytes_per_second
    return (topology.most_ranks - 1) / min(topology.ranks_per_node) * num_bytes * a_byte


def native_below_bytes(profile: Profile, num_nodes: int) -> int:
    """Below this many bytes MPI's own allreduce is used. If not measured: it costs 2 log2 m latencies, direct two."""
    if profile.native_below_bytes is not None:
        return profile.native_below_bytes
    if num_nodes == 1:
        return _NATIVE_INSIDE_BYTES
    more = 2 * (math.ceil(math.log2(num_nodes)) - 1) * profile.latency_seconds
    return _NATIVE_BETWEEN_BYTES if more < _PYTHON_SECONDS else 0


def bucket_bytes(profile: Profile, num_nodes: int) -> int:
    """The size of buckets at which latencies take a twentieth of the time. Not larger: the last bucket is never
    overlapped."""
    if not profile.is_measured or num_nodes == 1:
        return _DEFAULT_BUCKET_BYTES
    link = max((max(row) for row in profile.links), default=profile.bytes_per_second)
    needed = 20 * num_nodes * profile.latency_seconds * link
    return round(min(max(needed, 2**20), 64 * 2**20))


def codec_seconds(codec: str, num_values: int, topology: Topology) -> tuple[float, float]:
    """Predicted seconds of a sum of float32 between nodes: on the wire, and on a rank's core for the codec.

    Args:
        codec: its name, or "none".
        num_values: of all lanes together.
        topology: of the lanes between nodes. Its profile has the codec's rate; otherwise the second number is infinite.
    """
    coder = None if codec == "none" else factory_of(codec)(False)
    num_bytes = 4 * num_values if coder is None else coder.wire_bytes(num_values)
    lanes = max(topology.lanes, 1)
    wire = wire_seconds(num_bytes, replace(topology, lanes=1))
    if coder is None:
        return wire, 0.0
    rate = dict(topology.profile.codecs).get(codec, 0.0)
    return wire, 4 * num_values / lanes / rate if rate else math.inf


def best_codec(names: Iterable[str], num_values: int, topology: Topology) -> str:
    """The codec with the shortest sum, of those that take less than half of the time that they save on the wire;
    "none": there is none. Arguments: see codec_seconds."""
    plain, _ = codec_seconds("none", num_values, topology)
    seconds = {name: codec_seconds(name, num_values, topology) for name in names}
    paying = {name: wire + coding for name, (wire, coding) in seconds.items() if coding < (plain - wire) / 2}
    return min(paying, key=paying.__getitem__, default="none")


def compression(profile: Profile, num_nodes: int, lanes: int) -> str:
    """The codec that compression=auto stands for: by the measured profile, of those that have never cost loss."""
    if num_nodes == 1 or not profile.is_measured:
        return "none"
    return best_codec(codecs_of_auto(), _NOMINAL_VALUES, Topology(profile, (1,) * num_nodes, lanes))


def codecs_of_auto() -> list[str]:
    """The codecs that compression=auto may take: no measured training has lost anything with them."""
    return [name for name in CODECS if loss_with(name) == "none"]


def _rate(profile: Profile, lanes: int) -> float:
    return profile.bytes_per_second / lanes
