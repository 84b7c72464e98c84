"""Made-up clusters and checks, for tests of pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.check.check import Check, Finding, Seen
from mpitrain.check.target import DEFAULTS, Target
from mpitrain.launch.hostfile import Host


def target(num_nodes: int = 4, **fields: Any) -> Target:
    """node1 to nodeN at 10.0.0.1 and so on, with the defaults of set-up."""
    hosts = tuple(Host(f"node{number}", f"10.0.0.{number}") for number in range(1, num_nodes + 1))
    settings = {**DEFAULTS, "mpitrain_venv": "/home/cluster/nfs/venv", **fields.pop("settings", {})}
    values: dict[str, Any] = {
        "user": "cluster",
        "share": "/home/cluster/nfs",
        "venv": "/home/cluster/nfs/venv",
        "set_up": "ansible-playbook cluster/setup.yml",
        **fields,
    }
    return Target(hosts=hosts, settings=settings, **values)


def seen(num_nodes: int = 4, **fields: Any) -> Seen:
    """What was seen of such a cluster: nothing yet."""
    return Seen(target(num_nodes, **fields))


def here(sections: dict[str, Any], **fields: Any) -> Seen:
    """What was seen of one machine that is checked alone."""
    made = Seen(target(1, set_up="", share=None, venv="/v", python_here="/v/bin/python", **fields))
    made.nodes["node1"] = sections
    return made


def by_node(section: str) -> Any:
    """A judge for a node: it fails with the content of the section, if there is any."""

    def judge(seen: Seen, name: str) -> Iterator[Finding]:
        if found := seen.node(name, section):
            yield Finding("fail", found)

    return judge


def check(name: str, judge: Any, scope: Any = "node", **fields: Any) -> Check:
    """A check with all required fields."""
    values = {"title": "t", "level": "quick", "looks": "l", "why": "w.", "remedy": "mend {node}", **fields}
    return Check(name, scope=scope, judge=judge, **values)
