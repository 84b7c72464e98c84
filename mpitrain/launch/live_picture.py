"""What the live view of a job says at one moment, as docs/live.md describes it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mpitrain.watching.doing import doing
from mpitrain.watching.hang_report import is_by_design, report
from mpitrain.watching.rank_record import CALLED, STARTED, WAITS
from mpitrain.watching.view import RankView

VERSION = 1

# A host with a longer silence may do anything.
_SILENT_SECONDS = 3.0
# Shorter waits are part of any step.
_STALL_SECONDS = 1.0
_SPEED = "samples/s"


def of_ranks(
    views: Iterable[RankView],
    places: Mapping[str, Iterable[int]],
    silence: Mapping[str, float],
    loads: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the part of an answer that says what hosts and ranks do: hosts, ranks, metrics, record, stall and
    paused.

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
        entry = _rank(known[rank]) if rank in known else {**_ABSENT, "rank": rank, "host": host}
        if rank in lost:
            entry["phase"] = "lost"
        elif silence.get(host, 0.0) > _SILENT_SECONDS:
            entry["phase"] = "unknown"
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
    }


def plain(value: float) -> float | str:
    """Return a number as JSON can hold it: NaN and infinity as the strings of docs/metrics.md."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def is_over(ranks: Iterable[Mapping[str, Any]]) -> bool:
    """True if the program of every rank has finished."""
    phases = {entry["phase"] for entry in ranks} - {"lost"}
    return bool(phases) and phases <= {"done", "ended", "failed"}


_ABSENT: Mapping[str, Any] = {
    "pid": 0,
    "phase": "starts",
    "call": "",
    "calls": 0,
    "since": 0.0,
    "still": 0.0,
    "step": 0,
    "epoch": None,
    "samples_per_second": None,
}


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
        "step": record.step,
        "epoch": record.epoch or None,
        "samples_per_second": None if speed is None else plain(speed),
    }


def _stall(views: Mapping[int, RankView], host_of: Mapping[int, str], silence: Mapping[str, float]) -> str | None:
    """Say who waits for whom, if a rank has waited for long and nothing has moved."""
    silent = {host: seconds for host, seconds in silence.items() if seconds > _SILENT_SECONDS}
    seen = [view for view in views.values() if view.host not in silent]
    if is_by_design(seen) or not any(_stands(view) for view in seen):
        return None
    return report(seen, {rank: host for rank, host in host_of.items() if host in silent}, silent=silent)[0]


def _stands(view: RankView) -> bool:
    """True if a rank waits for others, for longer than it should. To start takes long."""
    limit = view.record.stall_seconds if view.record.phase in (STARTED, CALLED) else _STALL_SECONDS
    return view.record.status == WAITS and view.waits and view.seconds >= limit
