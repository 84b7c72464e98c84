"""In what runs differ, besides their numbers. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.training.run_document import RunDocument

_PACKAGE = "package "  # there are many, so they come last


def differences(documents: Sequence[RunDocument | None]) -> list[dict[str, Any]]:
    """Return the facts that are not equal in all documents: {"name": text, "values": [text or None...]}."""
    tables = [{} if document is None else _facts(document) for document in documents]
    names = dict.fromkeys(name for table in tables for name in table)
    ordered = sorted(names, key=lambda name: name.startswith(_PACKAGE))
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in ordered]
    return [row for row in rows if len(set(row["values"])) > 1]


def _facts(document: RunDocument) -> dict[str, str]:
    facts = {
        "script": document.script,
        "arguments": " ".join(document.arguments),
        "folder": document.folder,
        "commit": document.commit[:12] + (" and changes" if document.is_changed else ""),
        "strategy": document.strategy,
        "ranks": str(sum(map(len, document.hosts.values()))),
        "hosts": ", ".join(f"{host}: {len(ranks)}" for host, ranks in document.hosts.items()),
        "Python": document.python,
    }
    facts |= {f"setting {name}": str(value) for name, value in document.settings.items()}
    return facts | {_PACKAGE + name: str(version) for name, version in sorted(document.packages.items())}
