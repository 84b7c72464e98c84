"""The machines of a simulation: nodes, their links, racks, and what memory and codecs cost there.

They are equal, or those of a measured profile, or described by a file in TOML. In a file, every mistake is refused with
its line.

    [nodes]
    count = 64              # most nodes
    gbit = 1.0              # rate of each node's link, both ways at once, decimal: 1 is 125 MB/s
    latency_us = 50         # one way between two nodes; default 50
    ranks = 2               # on each node; default 1

    [inside]                # between two ranks of a node
    gbyte = 4.0             # rate in GB/s; default 4
    latency_us = 1          # default 1

    [racks]
    nodes = 16              # nodes of a rack: 0 to 15, 16 to 31, ...
    uplink_gbit = 4         # of each rack, each way

    [memory]
    add_gbyte = 4           # float32 that a rank adds in place, in GB/s; default 4
    copy_gbyte = 5          # or copies; default 5

    [[unequal]]             # as often as needed
    nodes = [3, 4]          # numbers, from 0
    gbit = 0.1              # rate of their links
    speed = 0.5             # they compute for twice as long

Only [nodes] with count and gbit is needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.errors import ConfigError
from mpitrain.profile import DEFAULT, Profile, from_json, read_profile
from mpitrain.reading import read_text, shown, toml_of

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
        """The largest possible number of ranks."""
        return self.num_nodes * self.ranks_per_node

    def rack_of(self, node: int) -> int:
        """The rack of a node."""
        return node // self.nodes_per_rack if self.nodes_per_rack else 0

    def pair_bytes_per_second(self, source: int, target: int) -> float:
        """The highest rate of one message from one node to another; infinity: that of the links."""
        return self.pairs[source][target] if self.pairs else math.inf

    def nodes_of(self, num_ranks: int) -> tuple[int, ...]:
        """The node of each of this many ranks. Nodes are filled one after the other.

        Raises:
            ConfigError: there is no room for this many.
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
    costs: Profile = DEFAULT,
) -> Machines:
    """Make machines that are all the same, in one rack. Default: the links of an ordinary Gigabit Ethernet.

    Of `costs`, which may be a profile of other machines, they have what memory and codecs cost.
    """
    return Machines(
        origin,
        ranks_per_node,
        (bytes_per_second,) * num_nodes,
        latency_seconds,
        (1.0,) * num_nodes,
        hosts=tuple(f"node{node}" for node in range(num_nodes)),
        costs=replace(costs, nodes=(), links=()),
    )


def from_profile(path: Path) -> Machines:
    """The machines on which `mpitrain bench --save-profile` has measured; see machines_of.

    Raises:
        ConfigError: there is no such file, it is damaged, or it has no data on a network.
    """
    text = read_profile(path)
    profile = from_json(text, str(path))
    ranks = sorted(set(json.loads(text)["fingerprint"]["ranks_per_node"]))
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


_GBIT, _GBYTE, _US = 1e9 / 8, 1e9, 1e-6
_KEYS: dict[str, tuple[str, ...]] = {
    "nodes": ("count", "gbit", "latency_us", "ranks"),
    "inside": ("gbyte", "latency_us"),
    "racks": ("nodes", "uplink_gbit"),
    "memory": ("add_gbyte", "copy_gbyte"),
    "unequal": ("nodes", "gbit", "speed"),
}
_REQUIRED = {"nodes": ("count", "gbit"), "racks": ("nodes", "uplink_gbit"), "unequal": ("nodes",)}
_MOST_NODES = 65536


def read_machines(path: Path) -> Machines:
    """Read the file.

    Raises:
        ConfigError: it cannot be read, or contradicts itself.
    """
    text = read_text(path, ConfigError)
    return _MachinesFile(path, text, toml_of(text, ConfigError, str(path))).machines()


class _MachinesFile:
    """A file that is being read."""

    def __init__(self, path: Path, text: str, content: Mapping[str, Any]) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._content = content

    def machines(self) -> Machines:
        """Return its content."""
        self._check_names()
        count = self._whole("nodes", "count", _MOST_NODES)
        latency = self._number("nodes", "latency_us", DEFAULT.latency_seconds / _US, least=0.0) * _US
        costs = replace(
            DEFAULT,
            add_bytes_per_second=self._number("memory", "add_gbyte", DEFAULT.add_bytes_per_second / _GBYTE) * _GBYTE,
            copy_bytes_per_second=self._number("memory", "copy_gbyte", DEFAULT.copy_bytes_per_second / _GBYTE) * _GBYTE,
        )
        result = equal_machines(
            count,
            bytes_per_second=self._number("nodes", "gbit") * _GBIT,
            latency_seconds=latency,
            ranks_per_node=self._whole("nodes", "ranks", 1024, 1),
            origin=str(self._path),
            costs=costs,
        )
        inside = result.inside_bytes_per_second / _GBYTE, result.inside_latency_seconds / _US
        result = replace(
            result,
            inside_bytes_per_second=self._number("inside", "gbyte", inside[0]) * _GBYTE,
            inside_latency_seconds=self._number("inside", "latency_us", inside[1], least=0.0) * _US,
        )
        if "racks" in self._content:
            result = self._with_racks(result)
        return self._with_unequal(result)

    def _with_racks(self, machines: Machines) -> Machines:
        nodes = self._whole("racks", "nodes", _MOST_NODES)
        if nodes >= machines.num_nodes:
            self._refuse(
                f"a rack has {nodes} nodes, and there are only {machines.num_nodes} nodes: no message passes an "
                "uplink. Leave out [racks], or raise the count of nodes", "racks", "nodes",
            )  # fmt: skip
        return replace(
            machines,
            nodes_per_rack=nodes,
            uplink_bytes_per_second=self._number("racks", "uplink_gbit") * _GBIT,
        )

    def _with_unequal(self, machines: Machines) -> Machines:
        rates, speeds = list(machines.link_bytes_per_second), list(machines.speeds)
        known: dict[int, int] = {}
        for place, entry in enumerate(self._content.get("unequal", [])):
            nodes = entry["nodes"]
            if not isinstance(nodes, list) or not nodes or any(type(node) is not int for node in nodes):
                self._refuse(
                    f"nodes is {shown(nodes)}; give numbers of nodes, such as [3, 4]", "unequal", "nodes", place
                )
            if len(entry) == 1:
                self._refuse("nodes without gbit or speed are as all others", "unequal", "nodes", place)
            for node in nodes:
                if not 0 <= node < machines.num_nodes:
                    self._refuse(
                        f"there is no node {node}: the nodes are 0 to {machines.num_nodes - 1}",
                        "unequal", "nodes", place,
                    )  # fmt: skip
                if node in known:
                    where = self._line("unequal", "nodes", known[node])
                    self._refuse(
                        f"node {node} is in line {where} already; one table has all of a node",
                        "unequal", "nodes", place,
                    )  # fmt: skip
                known[node] = place
                if "gbit" in entry:
                    rates[node] = self._number("unequal", "gbit", place=place) * _GBIT
                if "speed" in entry:
                    speeds[node] = self._number("unequal", "speed", place=place)
        return replace(machines, link_bytes_per_second=tuple(rates), speeds=tuple(speeds))

    def _check_names(self) -> None:
        for table, values in self._content.items():
            if table not in _KEYS:
                self._refuse(f"there is no table {shown(table)}; known: {', '.join(_KEYS)}", table)
            entries = values if table == "unequal" else [values]
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                form = "[[unequal]]" if table == "unequal" else f"[{table}]"
                self._refuse(f"{table} must be a table, {form}", table)
            for place, entry in enumerate(entries):
                for key in entry:
                    if key not in _KEYS[table]:
                        self._refuse(
                            f"{table} has no {shown(key)}; known: {', '.join(_KEYS[table])}", table, key, place
                        )
                for key in _REQUIRED.get(table, ()):
                    if key not in entry:
                        self._refuse(f"{table} needs {key}", table, place=place)
        if "nodes" not in self._content:
            raise ConfigError(f"{self._path}: the table [nodes] is missing, with {' and '.join(_REQUIRED['nodes'])}")

    def _whole(self, table: str, key: str, most: int, default: int | None = None) -> int:
        value = self._content.get(table, {}).get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            self._refuse(f"{key} is {shown(value)}; it must be a whole number from 1 to {most}", table, key)
        return int(value)

    def _number(
        self, table: str, key: str, default: float | None = None, *, least: float = 1e-6, place: int | None = None
    ) -> float:
        entry = self._content.get(table, {})
        value = (entry if place is None else entry[place]).get(key, default)
        if type(value) not in (int, float) or not least <= value <= 1e6 or math.isnan(value):
            self._refuse(f"{key} is {shown(value)}; it must be a number from {least:g} to 1e6", table, key, place or 0)
        return float(value)

    def _refuse(self, problem: str, table: str, key: str = "", place: int = 0) -> NoReturn:
        raise ConfigError(f"{self._path}, line {self._line(table, key, place)}: {problem}")

    def _line(self, table: str, key: str, place: int) -> int:
        """The line of the key in the table of that name with that number, or that of the table; from 1."""
        at, seen, inside, is_top = 1, -1, False, True
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[+\s*([^\]\s]+)\s*\]", line):
                is_top = False
                inside = header[1].strip("\"'") == table
                seen += inside
                if inside and seen == place:
                    at = number
            elif is_top and re.match(
                rf"\s*[\"']?{re.escape(table)}[\"']?\s*[.=]", line
            ):  # without a header: nodes.count = 3
                at = number
            if inside and seen == place and key and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return number
        return at
