"""Compare one answer of each node with those of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.diagnostics.check import Finding, NotSeenError, Seen


def usual(values: Mapping[str, Any], head: str) -> Any:
    """Return what most nodes have; the head's answer if there is no majority."""
    counts = Counter(repr(value) for value in values.values())
    most = max(counts.values())
    tied = [name for name, value in values.items() if counts[repr(value)] == most]
    return values[head if head in tied else tied[0]]


def known(seen: Seen, names: Sequence[str], section: str) -> tuple[dict[str, Any], list[Finding]]:
    """Return the known answers, and an "unknown" for each other node, which does not hide findings on the first."""
    answers, unknown = {}, []
    for name in names:
        try:
            answers[name] = seen.node(name, section)
        except NotSeenError as error:
            unknown.append(Finding("unknown", (name,), str(error)))
    return answers, unknown
