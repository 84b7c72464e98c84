"""Who waits for whom: which ranks have not entered a call, and who waits for them there. A pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpitrain.watching.ranges import rank_ranges

_LEAST_SECONDS = 1.0  # shorter waits are part of any step
# What keeps a rank from answering the others, also in a call that it has entered.
_HELD = ("starts", "stopped", "disk", "failed", "ended", "unknown", "busy", "paused")


def who_waits(look: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return who waits for whom, from an answer of the live status protocol; None: no wait of 1 s without progress.

    Return {"text": a sentence or two, "rows": one for all ranks that do the same}. A row has `ranks` as text, `hosts`,
    `does`, `seconds` (of the rank that does so longest) and `is_awaited`. The ranks for which others wait come first.
    """
    ranks = [entry for entry in look["ranks"] if entry["phase"] != "lost"]
    waiting = [entry for entry in ranks if entry["phase"] == "waits" and entry["still"] >= _LEAST_SECONDS]
    if not waiting or any("calls" not in entry for entry in ranks):  # the launcher may be an older one
        return None
    newest = max(entry["calls"] for entry in waiting)
    there = [entry for entry in waiting if entry["calls"] == newest]
    absent = [entry for entry in ranks if entry["phase"] != "waits" and entry["calls"] < newest]
    held = [entry for entry in ranks if entry["phase"] in _HELD and entry["calls"] >= newest]
    behind = [entry for entry in ranks if entry["phase"] == "waits" and entry["calls"] < newest]
    text = f"{_named(there)} {_verb(there, 'wait')} in {_call(there[0])}, for {_longest(there):.0f} s."
    if absent:
        text += f" {_named(absent)} {_verb(absent, 'have')} not entered it."
    if behind:
        text += f" {_named(behind)} {_verb(behind, 'wait')} in an earlier call."
    if held:
        text += f" {_named(held)} {_verb(held, 'have')} entered it, but {_verb(held, 'do')} not continue."
    if not (absent or behind or held):
        text += " All ranks have entered it."
    rows = [
        *_rows(absent + held, is_awaited=True),
        *_rows(behind, is_awaited=False),
        *_rows(there, is_awaited=False),
    ]
    return {"text": text, "rows": rows}


def _rows(entries: Iterable[Mapping[str, Any]], *, is_awaited: bool) -> list[dict[str, Any]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(_does(entry), []).append(entry)
    return [
        {
            "ranks": rank_ranges(sorted(entry["rank"] for entry in group)),
            "hosts": list(dict.fromkeys(entry["host"] for entry in group)),
            "does": does,
            "seconds": _longest(group),
            "is_awaited": is_awaited,
        }
        for does, group in groups.items()
    ]


def _does(entry: Mapping[str, Any]) -> str:
    if entry["phase"] == "waits":
        return f"waits in {_call(entry)}"
    after = f", after call {entry['calls']}" if entry["calls"] else ""
    return f"{entry['phase']}{after}" + (f": {entry['call']}" if entry["call"] else "")


def _call(entry: Mapping[str, Any]) -> str:
    return f"{entry['call']} (call {entry['calls']})" if entry["calls"] else str(entry["call"])


def _longest(entries: Iterable[Mapping[str, Any]]) -> float:
    return max(float(entry["since"]) for entry in entries)


def _named(entries: Sequence[Mapping[str, Any]]) -> str:
    numbers = rank_ranges(sorted(entry["rank"] for entry in entries))
    return f"Rank {numbers}" if len(entries) == 1 else f"Ranks {numbers}"


def _verb(entries: Sequence[object], verb: str) -> str:
    singular = {"wait": "waits", "have": "has", "do": "does"}
    return singular[verb] if len(entries) == 1 else verb
