"""Results for programs: JSON of a fixed form, published as docs/check-cluster.schema.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.diagnostics.check import Result, Seen, Target
from mpitrain.diagnostics.report import counts, group

VERSION = 1
# What `mpitrain check-cluster` keeps of its last run, for `mpitrain dashboard`, in the folder of the user's state.
REPORT_FILE, WAYS_FILE = "check-cluster.json", "check-cluster-ways.json"
KEPT_VERSION = 1


def document(
    results: Sequence[Result], target: Target, *, started: str, seconds: float, interrupted: bool
) -> dict[str, Any]:
    """Make the document. `started` is a time in RFC 3339 format."""
    return {
        "schema": VERSION,
        "started": started,
        "seconds": round(seconds, 3),
        "interrupted": interrupted,
        "nodes": target.addresses,
        "head": target.head,
        "counts": counts(results),
        "findings": [
            {
                "id": one.check.id,
                "title": one.check.title,
                "verdict": one.verdict,
                "places": one.places,
                "found": one.observed,
                "allowed": one.allowed,
                "why": one.check.why,
                "remedy": one.remedy,
                "blocks": list(one.blocks),
            }
            for one in group(results, target)
        ],
        "results": [
            {
                "id": result.check.id,
                "verdict": result.verdict,
                "where": list(result.where),
                "found": result.observed,
                "blocked_by": result.blocked_by,
            }
            for result in results
        ],
    }


def machines(seen: Seen) -> dict[str, dict[str, Any]]:
    """Return the cores and the memory of each node that has said so."""
    systems = {name: sections.get("system", {}) for name, sections in seen.nodes.items()}
    return {
        name: {"cores": system["cores"], "memory_bytes": system["memory_mib"] and system["memory_mib"] << 20}
        for name, system in systems.items()
        if "cores" in system
    }


def ways(seen: Seen, *, measured: float) -> dict[str, Any] | None:
    """Return latency and bandwidth from each node to each; None: they were not measured.

    Rows are the senders, in the order of "nodes"; what could not be measured is None. `measured` is when, in seconds
    since the epoch.
    """
    rates = seen.cluster.get("ways")
    if not isinstance(rates, dict) or not any("bytes_per_second" in one for one in rates.values() if one):
        return None
    names = list(seen.target.names)

    def table(field: str, scale: float) -> list[list[float | None]]:
        values = [[rates.get(f"{a} {b}", {}).get(field) for b in names] for a in names]
        return [[None if value is None else value * scale for value in row] for row in values]

    return {
        "measured": measured,
        "nodes": names,
        "latency_us": table("latency_seconds", 1e6),
        "bytes_per_second": table("bytes_per_second", 1.0),
    }
