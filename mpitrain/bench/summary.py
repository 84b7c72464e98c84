"""The result for programs, one JSON object, and the lines about the job above the table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mpitrain.bench.link import Link
from mpitrain.bench.point_to_point import Pairs
from mpitrain.bench.rounds import versions, versions_line
from mpitrain.bench.table import Row
from mpitrain.launch.tuning import SETTINGS
from mpitrain.world import World

SCHEMA = 1


# The variables of the MPI libraries and of what they use. Open MPI's mpiexec sets others itself, which tune nothing.
_PREFIXES = ("FI_", "I_MPI_ADJUST_", "I_MPI_FABRICS", "I_MPI_OFI_", "MPIR_CVAR_", "OMPI_MCA_", "UCX_")
_OF_LAUNCHER = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs")


def tuning_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tune MPI's own calls, also those that `mpitrain run` has set."""
    known = {one.name for one in SETTINGS}
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in known or (name.startswith(_PREFIXES) and name not in _OF_LAUNCHER)
    }


def preamble(world: World, link: Link) -> list[str]:
    """Return lines about versions, ranks, link and tuning."""
    tuned = " ".join(f"{name}={value}" for name, value in tuning_of(os.environ).items())
    return [f"# {versions_line()}", f"# {_ranks(world)}", f"# {link.about}", f"# tuning: {tuned or 'none'}"]


def as_json(
    world: World, link: Link, rows: Sequence[Row], pairs: Pairs | None, names: Sequence[str], device: str = "host"
) -> str:
    """Return the whole result. `names` are the members of the pairs; `device` is the place of the buffers."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": versions(),
        "hosts": list(world.hosts),
        "ranks_per_node": [world.node_ranks.count(node) for node in range(world.num_nodes)],
        "tuning": tuning_of(os.environ),
        "device": device,
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
