"""A result for programs: one JSON object, and the lines about the job that stand above the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mpitrain.bench.network import Link
from mpitrain.bench.point_to_point import Pairs
from mpitrain.bench.rounds import versions, versions_line
from mpitrain.bench.table import Row
from mpitrain.world import World

SCHEMA = 1


def preamble(world: World, link: Link) -> list[str]:
    """What was measured with what, and where."""
    return [f"# {versions_line()}", f"# {_ranks(world)}", f"# {link.about}"]


def as_json(world: World, link: Link, rows: Sequence[Row], pairs: Pairs | None, names: Sequence[str]) -> str:
    """The whole result. `names` are those of the pairs' members."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": versions(),
        "hosts": list(world.hosts),
        "ranks_per_node": [world.node_ranks.count(node) for node in range(world.num_nodes)],
        "link": {"about": link.about, "gbit": link.gbit},
        "rows": [asdict(row) for row in rows],
        "point_to_point": None,
    }
    if pairs is not None:
        rates = [[rate / 1e9 for rate in row] for row in pairs.bytes_per_second]
        document["point_to_point"] = {"names": list(names), "latency_us": pairs.latency_us, "gb_per_second": rates}
    return json.dumps(document, indent=2) + "\n"


def _ranks(world: World) -> str:
    if world.num_nodes == 1:
        return f"{world.size} ranks on {world.host}"
    nodes = range(world.num_nodes)
    hosts = [world.hosts[world.node_ranks.index(node)] for node in nodes]
    numbers = [world.node_ranks.count(node) for node in nodes]
    if len(set(numbers)) == 1:
        return f"{world.size} ranks on {len(hosts)} nodes, {numbers[0]} on each: {', '.join(hosts)}"
    return f"{world.size} ranks: " + ", ".join(
        f"{number} on {host}" for number, host in zip(numbers, hosts, strict=True)
    )
