"""What the machines of a job do in a step: computing, waiting for others, exchanging. A pure function of looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_MOVING = ("computes", "waits", "wire")  # phases of a step; others are named first
_ORDINARY = (*_MOVING, "busy", "paused", "starts", "done")  # others are trouble


def machines_of(looks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each host, or for each rank if there is one host, from looks at one job, the oldest first.

    Those in trouble come first, then those that compute longest.

    Each rank publishes its steps and for how long it has waited in all. A rank computes while it does not wait. Even
    the rank that waits least waits while data arrive, so that wait is the exchange; the rest of the others' waits is
    for slower ranks. A row has `name`, `step` (the least of its ranks), `does` (its ranks by what they do now, the odd
    ones first), and `computes`, `waits` and `exchanges` in seconds a step (of its slowest rank); None: there was no
    step in these looks.
    """
    if not looks:
        return []
    last = looks[-1]
    first = next((look for look in looks if look["job"] == last["job"]), last)
    seconds = last["at"] - first["at"]
    begun = {entry["rank"]: entry for entry in first["ranks"]}
    waits: dict[int, tuple[float, float]] = {}  # of each rank the seconds of a step, and of the waits in it
    for entry in last["ranks"]:
        steps = entry["step"] - begun[entry["rank"]]["step"] if entry["rank"] in begun else 0
        if steps > 0 and begun[entry["rank"]]["step"] > 0 and seconds > 0:
            waited = max(0.0, entry.get("waited", 0.0) - begun[entry["rank"]].get("waited", 0.0))
            waits[entry["rank"]] = seconds / steps, min(waited, seconds) / steps
    exchange = min((waited for _, waited in waits.values()), default=0.0)
    rows = []
    units = {host: [entry for entry in last["ranks"] if entry["host"] == host] for host in last["hosts"]}
    if len(units) == 1:
        units = {f"rank {entry['rank']}": [entry] for entry in last["ranks"]}
    for name, ranks in units.items():
        times = [waits[entry["rank"]] for entry in ranks if entry["rank"] in waits]
        step, waited = max(times, key=lambda time: time[0] - time[1], default=(None, 0.0))
        phases = sorted(Counter(entry["phase"] for entry in ranks).items(), key=lambda item: item[0] in _MOVING)
        rows.append(
            {
                "name": name,
                "step": min((entry["step"] for entry in ranks), default=0),
                "does": ", ".join(f"{count} {phase}" if len(ranks) > 1 else phase for phase, count in phases),
                "isOdd": any(phase not in _ORDINARY for phase, _ in phases),
                "computes": None if step is None else step - waited,
                "waits": None if step is None else waited - exchange,
                "exchanges": None if step is None else exchange,
            }
        )
    return sorted(rows, key=lambda row: (not row["isOdd"], -(row["computes"] or 0.0)))
