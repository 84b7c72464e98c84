"""A made-up cluster that was checked and measured, as `mpitrain check-cluster` and `mpitrain bench` keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from check.made_up import by_node, check, seen
from mpitrain.check import report
from mpitrain.check.run import judge
from mpitrain.profile import to_json
from mpitrain.state_files import keep_state

INVENTORY = """
[head]
node1 ansible_host=10.0.0.1
[workers]
node2 ansible_host=10.0.0.2
node3 ansible_host=10.0.0.3
[cluster:children]
head
workers
"""
STARTED = "2026-11-26T10:00:00+00:00"
AT = 1795687200.0  # the same


def keep_check(state: Path, observed: str = "not mounted", **content: Any) -> Path:
    """Keep a report of four nodes; on two of them the same fault. Returns the file."""
    saw = seen(4)
    found = {"node2": observed, "node3": observed}
    saw.nodes = {name: {"a": found.get(name, "")} for name in saw.target.names}
    saw.nodes["node1"]["system"] = {"cores": 8, "memory_mib": 16000}
    saw.nodes["node4"]["system"] = {"cores": 4, "memory_mib": None}
    results = judge([check("AAA01", by_node("a"), why="Ranks write there.", remedy="mount it")], saw)
    kept = report.document(results, saw.target, started=STARTED, seconds=2.5, interrupted=False)
    path = state / "mpitrain" / report.REPORT_FILE
    asked = {"level": "full", "only": [], "skip": ["NFS01"]}
    keep_state(path, 1, {**asked, "machines": report.machines(saw), "report": kept, **content})
    return path


def keep_ways(state: Path) -> Path:
    """Keep what was measured between four nodes: from node a to node b a + 10 b MB/s; not from node2 to node1."""
    saw = seen(4)
    pairs = [(a, b) for a in range(1, 5) for b in range(1, 5) if a != b]
    rates = {
        f"node{a} node{b}": {"latency_seconds": (a + b) * 1e-6, "bytes_per_second": (a + 10 * b) * 1e6}
        for a, b in pairs
    }
    rates["node2 node1"] = {"error": "no answer"}
    saw.cluster["ways"] = rates
    path = state / "mpitrain" / report.WAYS_FILE
    measured = report.ways(saw, measured=AT)
    assert measured is not None
    keep_state(path, 1, measured)
    return path


def keep_profile(path: Path, **changes: Any) -> Path:
    """Write a profile of two nodes, as `mpitrain bench --save-profile` does."""
    measured = {"link_bytes_per_second": [[0.0, 1e8], [5e7, 0.0]], "link_latency_us": [[0.0, 30.0], [40.0, 0.0]]}
    path.write_text(to_json(measured | changes, ["a", "b"], {}, {}))
    return path


def change(path: Path, **fields: Any) -> None:
    """Change fields of a file with JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
