"""What --json prints: one JSON object, also where a hook or a loss has said NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def print_object(content: Mapping[str, Any]) -> None:
    """Print the object on stdout. JSON has no NaN and no infinity: they are strings, as in metrics.jsonl."""
    print(json.dumps(_plain(content), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    from mpitrain.launch.live_picture import plain

    if isinstance(value, float):
        return plain(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
