"""Results for programs: JSON of a fixed form, published as docs/check-cluster.schema.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.diagnostics.check import Result, Target
from mpitrain.diagnostics.report import counts, group

VERSION = 1


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
