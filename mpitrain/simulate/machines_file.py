"""The file that describes machines which are not here, in TOML. Every mistake is refused with its line.

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

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.errors import ConfigError
from mpitrain.profile import DEFAULT
from mpitrain.simulate.machines import Machines, equal_machines

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
    try:
        text = path.read_text()
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _MachinesFile(path, text, content).machines()


class _MachinesFile:
    """A file in reading."""

    def __init__(self, path: Path, text: str, content: Mapping[str, Any]) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._content = content

    def machines(self) -> Machines:
        """Return what it says."""
        self._check_names()
        count = self._whole("nodes", "count", _MOST_NODES)
        latency = self._number("nodes", "latency_us", DEFAULT.latency_seconds / _US, least=0.0) * _US
        result = equal_machines(
            count,
            bytes_per_second=self._number("nodes", "gbit") * _GBIT,
            latency_seconds=latency,
            ranks_per_node=self._whole("nodes", "ranks", 1024, 1),
            origin=str(self._path),
        )
        costs = replace(
            DEFAULT,
            add_bytes_per_second=self._number("memory", "add_gbyte", DEFAULT.add_bytes_per_second / _GBYTE) * _GBYTE,
            copy_bytes_per_second=self._number("memory", "copy_gbyte", DEFAULT.copy_bytes_per_second / _GBYTE) * _GBYTE,
        )
        inside = result.inside_bytes_per_second / _GBYTE, result.inside_latency_seconds / _US
        result = replace(
            result,
            costs=costs,
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
                self._refuse(f"nodes is {nodes!r}; give numbers of nodes, such as [3, 4]", "unequal", "nodes", place)
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
                self._refuse(f"there is no table {table!r}; known: {', '.join(_KEYS)}", table)
            entries = values if table == "unequal" else [values]
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                form = "[[unequal]]" if table == "unequal" else f"[{table}]"
                self._refuse(f"{table} must be a table, {form}", table)
            for place, entry in enumerate(entries):
                for key in entry:
                    if key not in _KEYS[table]:
                        self._refuse(f"{table} has no {key!r}; known: {', '.join(_KEYS[table])}", table, key, place)
                for key in _REQUIRED.get(table, ()):
                    if key not in entry:
                        self._refuse(f"{table} needs {key}", table, place=place)
        if "nodes" not in self._content:
            raise ConfigError(f"{self._path}: the table [nodes] is missing, with {' and '.join(_REQUIRED['nodes'])}")

    def _whole(self, table: str, key: str, most: int, default: int | None = None) -> int:
        value = self._content.get(table, {}).get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            self._refuse(f"{key} is {value!r}; it must be a whole number from 1 to {most}", table, key)
        return int(value)

    def _number(
        self, table: str, key: str, default: float | None = None, *, least: float = 1e-6, place: int | None = None
    ) -> float:
        entry = self._content.get(table, {})
        value = (entry if place is None else entry[place]).get(key, default)
        if type(value) not in (int, float) or not least <= value <= 1e6 or math.isnan(value):
            self._refuse(f"{key} is {value!r}; it must be a number from {least:g} to 1e6", table, key, place or 0)
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
