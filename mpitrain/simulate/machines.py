"""The machines of a simulation: nodes, their links, racks, and what memory and codecs cost there."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.profile import DEFAULT, Profile, from_json

# Between two ranks of one node, if nothing is said: what MPI moves through shared memory on an ordinary machine.
_INSIDE_BYTES_PER_SECOND, _INSIDE_LATENCY_SECONDS = 4e9, 1e-6


@dataclass(frozen=True)
class Machines:
    """Nodes, with as many ranks each.

    Attributes:
        origin: where the numbers come from, for messages.
        ranks_per_node: on each node.
        link_bytes_per_second: by node, the same in both directions at once.
        latency_seconds: one way between two nodes.
        speeds: by node, how fast its ranks compute: 0.5 takes twice as long as 1.
        nodes_per_rack: the nodes of a rack are neighbours by number; the last rack may have fewer. 0: one rack has all.
        uplink_bytes_per_second: of each rack, in each direction.
        pairs: by sender and receiver, bytes a second that one message gets at most; empty: as much as the links.
        hosts: names of the nodes.
        costs: what memory and codecs cost: add_bytes_per_second, copy_bytes_per_second, codecs.
    """

    origin: str
    ranks_per_node: int
    link_bytes_per_second: tuple[float, ...]
    latency_seconds: float
    speeds: tuple[float, ...]
    nodes_per_rack: int = 0
    uplink_bytes_per_second: float = math.inf
    inside_bytes_per_second: float = _INSIDE_BYTES_PER_SECOND
    inside_latency_seconds: float = _INSIDE_LATENCY_SECONDS
    pairs: tuple[tuple[float, ...], ...] = ()
    hosts: tuple[str, ...] = ()
    costs: Profile = DEFAULT

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.link_bytes_per_second)

    @property
    def num_ranks(self) -> int:
        """The most ranks that there is room for."""
        return self.num_nodes * self.ranks_per_node

    @property
    def num_racks(self) -> int:
        """The number of racks."""
        return -(-self.num_nodes // self.nodes_per_rack) if self.nodes_per_rack else 1

    def rack_of(self, node: int) -> int:
        """The rack of a node."""
        return node // self.nodes_per_rack if self.nodes_per_rack else 0

    def pair_bytes_per_second(self, source: int, target: int) -> float:
        """What one message gets at most from one node to another; infinity: as much as the links."""
        return self.pairs[source][target] if self.pairs else math.inf

    def nodes_of(self, num_ranks: int) -> tuple[int, ...]:
        """The node of each of so many ranks. Nodes are filled one after the other.

        Raises:
            ConfigError: there is no room for so many.
        """
        if not 1 <= num_ranks <= self.num_ranks:
            raise ConfigError(
                f"{num_ranks} ranks were asked for; {self.origin} has room for 1 to {self.num_ranks}: "
                f"{self.num_nodes} nodes with {self.ranks_per_node} each"
            )
        return tuple(rank // self.ranks_per_node for rank in range(num_ranks))

    def profile(self, num_nodes: int) -> Profile:
        """What `mpitrain bench --save-profile` would measure on the first nodes."""
        rates = sorted(self.link_bytes_per_second[:num_nodes])
        return replace(
            self.costs,
            origin=self.origin,
            latency_seconds=self.latency_seconds,
            bytes_per_second=rates[len(rates) // 2],
            links=tuple(row[:num_nodes] for row in self.costs.links[:num_nodes]),
            nodes=self.hosts[:num_nodes],
        )


def equal_machines(
    num_nodes: int,
    *,
    bytes_per_second: float = DEFAULT.bytes_per_second,
    latency_seconds: float = DEFAULT.latency_seconds,
    ranks_per_node: int = 1,
    origin: str = "equal machines",
) -> Machines:
    """Make machines that are all the same, in one rack. Default: the links of an ordinary Gigabit Ethernet."""
    return Machines(
        origin,
        ranks_per_node,
        (bytes_per_second,) * num_nodes,
        latency_seconds,
        (1.0,) * num_nodes,
        hosts=host_names(num_nodes),
    )


def host_names(num_nodes: int) -> tuple[str, ...]:
    """Names for nodes without one."""
    return tuple(f"node{node}" for node in range(num_nodes))


def from_profile(path: Path) -> Machines:
    """The machines on which `mpitrain bench --save-profile` has measured; see machines_of.

    Raises:
        ConfigError: there is no such file, it is damaged, or it says nothing of a network.
    """
    try:
        text = path.read_text()
        here = json.loads(text)["fingerprint"]
        ranks = sorted(set(here["ranks_per_node"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a profile ({error}); `mpitrain bench --save-profile FILE` writes one"
        ) from None
    profile = from_json(text, str(path), here)
    if not profile.links:
        raise ConfigError(f"the profile {path} is of one node, and says nothing of a network. Measure several nodes")
    if len(ranks) > 1:
        raise ConfigError(f"the profile {path} has {ranks} ranks on its nodes; a simulation takes equally many on each")
    return machines_of(profile, int(ranks[0]))


def machines_of(profile: Profile, ranks_per_node: int) -> Machines:
    """The machines of a profile that has links. A node's link is its fastest pair's."""
    rates = tuple(
        max(*profile.links[node], *(row[node] for row in profile.links)) for node in range(len(profile.nodes))
    )
    pairs = tuple(
        tuple(math.inf if source == target else rate for target, rate in enumerate(row))
        for source, row in enumerate(profile.links)
    )
    return Machines(
        profile.origin,
        ranks_per_node,
        rates,
        profile.latency_seconds,
        (1.0,) * len(rates),
        pairs=pairs,
        hosts=profile.nodes,
        costs=profile,
    )
