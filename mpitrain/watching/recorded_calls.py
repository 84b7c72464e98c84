"""Which rank has not made the collective call that the others of its group wait in, from the flight recorder of each.

PyTorch's flight recorder, group default_pg: ranks 0,2 have called all_reduce 381 (Float [4096], train.py:12 (main));
rank 1 has not: its last call is broadcast 380 (Float [8], train.py:30 (evaluate))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.watching.ranges import rank_ranges

_MOST_GROUPS = 4
_BEGIN = "PyTorch's flight recorder, group"


def report_of_calls(recorded: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a line for each group in which ranks wait for others; `recorded` is by rank, as asked_calls."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Mapping[str, Any]]] = {}
    for rank, calls in recorded.items():
        for call in calls:
            groups.setdefault((call["group"], tuple(call["ranks"])), {})[rank] = call
    lines = [
        f"{_BEGIN} {name}: {said}"
        for (name, members), calls in groups.items()
        if (said := _of_group(set(members) or set(calls), calls, set(recorded)))
    ]
    more = [f"{_BEGIN}: {len(lines) - _MOST_GROUPS} more groups wait"] if len(lines) > _MOST_GROUPS else []
    return lines[:_MOST_GROUPS] + more


def _of_group(members: set[int], calls: Mapping[int, Mapping[str, Any]], known: set[int]) -> str:
    newest = max(call["number"] for call in calls.values())
    ahead = {rank: call for rank, call in calls.items() if call["number"] == newest}
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(ahead.items()):
        alike.setdefault((call["call"], call["what"]), []).append(rank)
    if len(alike) > 1:
        parts = [f"{_ranks(ranks)} {_have(ranks)} called {_call(ahead[ranks[0]])}" for ranks in alike.values()]
        return f"the calls differ: {'; '.join(parts)}"
    behind = sorted(members & known - ahead.keys())
    if not behind and all(call["state"] == "completed" for call in ahead.values()):
        return ""
    ranks = sorted(ahead)
    parts = [f"{_ranks(ranks)} {_have(ranks)} called {_call(ahead[ranks[0]])}"]
    for rank in behind:
        last = f"its last call is {_call(calls[rank])}" if rank in calls else "it has called nothing in this group"
        parts.append(f"rank {rank} has not: {last}")
    if unknown := sorted(members - known):
        parts.append(f"nothing is recorded of {_ranks(unknown)}")
    elif not behind:
        parts.append("all have called it, and it has not ended on all")
    return "; ".join(parts)


def _call(call: Mapping[str, Any]) -> str:
    more = ", ".join(filter(None, (call["what"], call["place"])))
    return f"{call['call']} {call['number']}" + (f" ({more})" if more else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
