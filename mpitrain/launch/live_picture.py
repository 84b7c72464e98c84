"""What the live view of a job says at one moment, as formats-and-protocols.md describes it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpitrain.launch.printed import newest_progress
from mpitrain.watching.hang_report import doing, is_by_design, report
from mpitrain.watching.rank_facts import ALWAYS, FACTS, KNOWN, RankFact
from mpitrain.watching.rank_record import CALLED, STARTED, WAITS, RankRecord
from mpitrain.watching.view import RankView

# The state of a host with a longer silence is unknown.
_SILENT_SECONDS = 3.0
# Shorter waits are part of any step.
_STALL_SECONDS = 1.0
_SPEED = "samples/s"
_LEAST_SECONDS = 0.9  # between looks: less says little of long steps
# A rank counts as slow if the others wait for so much of the time, and it computes so many times as long.
_LEAST_SHARE, _LEAST_TIMES = 0.2, 1.5
PAUSE = "a pause "  # begins what a rank in a pause is busy with (training/steering.py)


def of_ranks(
    views: Iterable[RankView],
    places: Mapping[str, Iterable[int]],
    silence: Mapping[str, float],
    loads: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the part of an answer that says what hosts and ranks do: hosts, ranks, metrics, record, stall,
    paused and printed.

    Args:
        views: the ranks that have appeared, each with its host.
        places: the ranks of each host, also those that have not appeared.
        silence: for how long each host has been silent, in seconds.
        loads: how busy each host is, where it is known.
    """
    known = {view.record.rank: view for view in views}
    lost = {rank for view in known.values() for rank in view.record.lost}
    host_of = {rank: host for host, ranks in places.items() for rank in ranks}
    ranks = []
    for rank, host in sorted(host_of.items()):
        entry = _rank(known.get(rank) or RankView(RankRecord(rank), 0, host=host))
        if rank in lost:
            entry["phase"] = "lost"
        elif silence.get(host, 0.0) > _SILENT_SECONDS:
            entry["phase"] = "unknown"
        elif entry["phase"] == "busy" and entry["call"].startswith(PAUSE):  # `paused` has who paused it
            entry |= {"phase": "paused", "call": ""}
        ranks.append(entry)
    first = next((view.record for _, view in sorted(known.items()) if view.record.metrics), None)
    return {
        "hosts": {
            host: {"silence": round(silence.get(host, 0.0), 1), "ranks": list(numbers), "load": (loads or {}).get(host)}
            for host, numbers in places.items()
        },
        "ranks": ranks,
        "metrics": {name: plain(value) for name, value in first.metrics.items()} if first else {},
        "record": next((view.record.record_folder for view in known.values() if view.record.record_folder), None),
        "stall": _stall({rank: view for rank, view in known.items() if rank not in lost}, host_of, silence),
        "paused": next((view.record.paused for _, view in sorted(known.items()) if view.record.steering), ""),
        "printed": False,
    }


def add_printed(picture: dict[str, Any], lines_of: Callable[[int], Iterable[str]]) -> None:
    """Add steps and the loss of a script that publishes none: from what its ranks print, whose newest lines `lines_of`
    returns, the newest first."""
    if any(entry["step"] for entry in picture["ranks"]) or picture["metrics"]:
        return
    for entry in picture["ranks"]:
        step, loss = newest_progress(lines_of(entry["rank"]))
        entry["step"] = step or 0
        if loss is not None:
            picture["metrics"].setdefault("loss", plain(loss))
    picture["printed"] = bool(picture["metrics"]) or any(entry["step"] for entry in picture["ranks"])
    for entry in picture["ranks"]:
        if picture["printed"] and entry["phase"] == "starts":  # as a rank seems that never calls init()
            entry["phase"] = "computes"


def plain(value: float) -> float | str:
    """Return a number as JSON can hold it: NaN and infinity as the strings of docs/how-to/monitor.md#record-metrics."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def is_over(ranks: Iterable[Mapping[str, Any]]) -> bool:
    """True if the program of every rank has finished."""
    phases = {entry["phase"] for entry in ranks} - {"lost"}
    return bool(phases) and phases <= {"done", "ended", "failed"}


def facts_of(record: RankRecord) -> dict[str, Any]:
    """Return the facts of a rank as JSON can hold them, by name; see rank_facts.FACTS."""
    values = {fact: record.facts.get(fact.name, fact.absent) for fact in FACTS}
    return {
        fact.name: value if value is None else plain(round(value, 3) if fact.unit == "seconds" else value)
        for fact, value in values.items()
    }


def fact_columns(ranks: Sequence[Mapping[str, Any]]) -> list[RankFact]:
    """Return the facts for which a table of these ranks, as in an answer, has a column."""
    return [
        fact
        for fact in FACTS
        if fact.column == ALWAYS
        or (fact.column == KNOWN and any(entry.get(fact.name, fact.absent) != fact.absent for entry in ranks))
    ]


def _rank(view: RankView) -> dict[str, Any]:
    record = view.record
    speed = record.metrics.get(_SPEED)
    return {
        "rank": record.rank,
        "host": view.host,
        "pid": view.pid,
        "phase": doing(view),
        "call": record.words or (record.error if record.error else ""),
        "calls": record.calls,
        "since": round(view.doing_seconds if view.ended_seconds is None else view.ended_seconds, 1),
        "still": round(view.seconds, 1),
        **facts_of(record),
        "samples_per_second": None if speed is None else plain(speed),
    }


def waiting_shares(looks: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the share of the time of these looks, oldest first, in which each rank has waited for others.

    {}: they are too few, or not all ranks train. Every rank publishes how long it has waited in all. A wait that
    continues is not counted yet, so a share is a little too small.
    """
    job = looks[-1]["job"] if looks else ""
    trained = [look for look in looks if look["job"] == job and all(one["step"] for one in look["ranks"])]
    if not trained or (seconds := trained[-1]["at"] - trained[0]["at"]) < _LEAST_SECONDS:
        return {}
    waited = {entry["rank"]: entry.get("waited", 0.0) for entry in trained[0]["ranks"]}
    moved = [one for one in trained[-1]["ranks"] if one["phase"] != "lost" and one["rank"] in waited]
    return {one["rank"]: min(1.0, max(0.0, one.get("waited", 0.0) - waited[one["rank"]]) / seconds) for one in moved}


def slow_rank(looks: Sequence[Mapping[str, Any]]) -> str:
    """Return which rank makes the others wait in these looks, oldest first, in a sentence; "": none does.

    The rank that computes longest in a step waits least.
    """
    waiting = waiting_shares(looks)
    if len(waiting) < 2:
        return ""
    shares = [(waiting[one["rank"]], one) for one in looks[-1]["ranks"] if one["rank"] in waiting]
    (least, slow), *others = sorted(shares, key=lambda item: (item[0], item[1]["rank"]))
    share = others[len(others) // 2][0]
    times = (1 - least) / max(1e-3, 1 - share)
    if share < _LEAST_SHARE or times < _LEAST_TIMES:
        return ""
    whom = f"{len(others)} ranks wait" if len(others) > 1 else f"rank {others[0][1]['rank']} waits"
    return f"rank {slow['rank']} on {slow['host']} is {times:.1f}x slower: {whom} for it, {share:.0%} of the time"


def _stall(views: Mapping[int, RankView], host_of: Mapping[int, str], silence: Mapping[str, float]) -> str | None:
    """Return which ranks wait for which, if a rank has waited for long without progress."""
    silent = {host: seconds for host, seconds in silence.items() if seconds > _SILENT_SECONDS}
    seen = [view for view in views.values() if view.host not in silent]
    if is_by_design(seen) or not any(_stands(view) for view in seen):
        return None
    return report(seen, {rank: host for rank, host in host_of.items() if host in silent}, silent=silent)[0]


def _stands(view: RankView) -> bool:
    """True if a rank waits for others, for longer than it should. To start takes long."""
    limit = view.record.stall_seconds if view.record.phase in (STARTED, CALLED) else _STALL_SECONDS
    return view.record.status == WAITS and view.waits and view.seconds >= limit
