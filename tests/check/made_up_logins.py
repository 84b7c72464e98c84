"""Made-up answers of nodes about logins, and what the checks say of them."""

from __future__ import annotations

from typing import Any

from check.made_up import seen
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge

KEY = {
    "path": "/etc/ssh/mpitrain/id_ed25519",
    "mode": "0600",
    "is_own": True,
    "is_readable": True,
    "bits": 256,
    "fingerprint": "SHA256:a",
    "kind": "ED25519",
}


def judged(id_: str, looked: Seen) -> list[Result]:
    """The results of a check, as if all checks that it needs had passed."""
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]


def of_node(section: str, answer: Any) -> Seen:
    looked = seen(2)
    looked.nodes = {"node1": {section: answer}, "node2": {}}
    return looked


def first(id_: str, looked: Seen) -> Result | None:
    """The first result for node1."""
    return next((one for one in judged(id_, looked) if one.where and one.where[0] == "node1"), None)


def login(failed: str, found: str = "", seconds: float = 0.2) -> Seen:
    looked = seen(2)
    looked.nodes = {"node1": {}, "node2": {}}
    looked.pairs[("node1", "node2")] = {"login between": {"failed": failed, "found": found, "seconds": seconds}}
    return looked
