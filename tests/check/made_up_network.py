"""A made-up network of healthy nodes."""

from __future__ import annotations

from typing import Any

from check.made_up import seen
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge

PAIR = ("node1", "node2")


REACH = {
    "connect": "ok",
    "found": "",
    "round_trips_seconds": [2e-4],
    "large_is_complete": True,
    "ping": {"large": True, "small": True},
    "mtu_bytes": 1500,
}


def interface(*addresses: str, **fields: Any) -> dict[str, Any]:
    found = {"is_up": True, "is_running": True, "mtu_bytes": 1500, "speed_mbit": 1000, "duplex": "full"}
    return {**found, "addresses": list(addresses), **fields}


def healthy(num_nodes: int = 4, **fields: Any) -> Seen:
    looked = seen(num_nodes, **fields)
    for name, address in looked.target.addresses.items():
        routes = {
            other: {"interface": "eth0", "source": address, "gateway": "", "network": "10.0.0.0/24"}
            for other in looked.target.names
            if other != name
        }
        looked.nodes[name] = {
            "network": {
                "interfaces": {"lo": interface("127.0.0.1/8"), "eth0": interface(f"{address}/24")},
                "routes": routes,
                "rdma": [],
                "firewall": "",
            },
            "counters": {"eth0": {"rx_errors": 0}},
            "ports": {"22": "sshd (pid 1)"},
            "variables": {},
        }
        for other in routes:
            looked.pairs[(name, other)] = {"reach": dict(REACH), "login between": {"failed": "", "seconds": 0.1}}
    return looked


def judged(id_: str, looked: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]
