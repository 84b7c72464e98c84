"""Find out if a node's high ports are closed. To a busy node, or through a busy tunnel, a connection may take too long.

So a port that seems closed is tried again, in turns with ssh's port of that node. It is open if any connection comes
about, and closed if none does while ssh's port answers each time. Otherwise nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_TURNS = 2
_ANSWERS = ("ok", "refused")  # of a port: the way there works


def in_turns(connect: Callable[[], dict[str, Any]], answer: Callable[[], str]) -> dict[str, Any]:
    """What the first `connect` that succeeds says, or the last; "beside": what ssh's port answered between them."""
    reached, beside = connect(), list[str]()
    while reached["connect"] != "ok" and len(beside) < _TURNS:
        beside.append(answer())
        reached = connect()
    return {**reached, "beside": beside}


def why_unclear(reached: Mapping[str, Any]) -> str:
    """The reason why a failed connection to a high port proves nothing. "" if it proves something."""
    if reached["connect"] == "ok" or all(answer in _ANSWERS for answer in reached["beside"]):
        return ""
    answers = ", ".join(reached["beside"])
    return f"a high port gave no connection ({reached['found']}), and ssh's port, in turns with it: {answers}"
