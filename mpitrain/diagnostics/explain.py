"""The description of a check, for --explain and for docs/checks.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from mpitrain.diagnostics.check import Check

_SCOPES = {
    "cluster": "the cluster as a whole",
    "node": "each node",
    "head": "the head",
    "pair": "each pair of nodes, in both directions",
    "way": "the way from the head to each other node",
}


def explain(check: Check, width: int) -> str:
    """All about one check, wrapped to `width`."""
    parts = [f"{check.id}  {check.title}", ""]
    for label, words in _facts(check):
        parts += textwrap.wrap(
            f"{label:<10}{words}", width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(parts)


def listing(checks: Iterable[Check]) -> str:
    """One line per check."""
    return "\n".join(f"{check.id:<6} {check.level:<6} {check.title}" for check in checks)


def table(checks: Iterable[Check]) -> str:
    """docs/checks.md."""
    lines = [
        "# The checks of `mpitrain check-cluster`",
        "",
        "Made from the checks themselves; `mpitrain check-cluster --explain ID` says the same.",
        "[fault-matrix.md](fault-matrix.md) has the faults that prove them. In repairs, `{login}` is what `ssh` needs",
        "to reach the node: its address, with the user, the port and the key that the inventory names.",
    ]
    for check in checks:
        lines += ["", f"## {check.id}: {check.title}", ""]
        lines += [f"- **{label}**: {words}" for label, words in _facts(check)]
    return "\n".join(lines) + "\n"


def described(check: Check) -> dict[str, str]:
    """Return what is known of a check, by name."""
    return {"id": check.id, "title": check.title, **dict(_facts(check))}


def _facts(check: Check) -> list[tuple[str, str]]:
    facts = [
        ("level", check.level),
        ("of", f"{_SCOPES[check.scope]}{'; `mpitrain doctor` makes it too' if check.alone else ''}"),
        ("looks", check.looks),
        ("why", check.why),
        ("needs", ", ".join([*check.needs, *(f"{name} of the head" for name in check.needs_head)])),
        ("repair", check.remedy or (f"ansible-playbook cluster/setup.yml --tags {check.tag}" if check.tag else "")),
        ("proved by", check.fault),
    ]
    return [(label, words) for label, words in facts if words]
