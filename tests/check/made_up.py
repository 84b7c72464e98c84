"""Made-up clusters and checks, and what the checks say of them, for tests of pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.check.check import Check, Finding, Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge
from mpitrain.check.target import DEFAULTS, Target
from mpitrain.launch.hostfile import Host

MIB = 1 << 20
SET_UP = "ansible-playbook cluster/setup.yml --tags {tag} --limit {{limit}}"


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


def of_each(num_nodes: int, sections: dict[str, Any], **fields: Any) -> Seen:
    """All nodes gave these answers."""
    made = seen(num_nodes, **fields)
    made.nodes = {name: dict(sections) for name in made.target.names}
    return made


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


def judged(id_: str, looked: Seen) -> list[Result]:
    """The results of a check that are no pass, as if all checks that it needs had passed."""
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]


def sound(id_: str, *looked: Seen) -> None:
    """The check passes everywhere."""
    assert [judged(id_, one) for one in looked] == [[]] * len(looked)


def verdicts(id_: str, looked: Seen) -> set[str]:
    return {one.verdict for one in judge([CHECKS[id_]], looked)}


def only(id_: str, looked: Seen, verdict: str, where: str, found: str, remedy: str = "", allowed: str = "") -> Result:
    """The check says one thing about these places, with these words in it. A finding has a repair and names no node."""
    (result,) = judged(id_, looked)
    assert (result.verdict, result.where) == (verdict, tuple(where.split()))
    assert found in result.observed and remedy in result.remedy and allowed in result.allowed, result
    says_what_is_allowed = result.allowed or id_[:3] in ("ENV", "NET", "SSH")
    assert verdict not in ("warn", "fail") or (result.remedy and says_what_is_allowed)
    assert verdict not in ("warn", "fail") or len(result.where) != 1 or result.where[0] not in result.observed
    return result
