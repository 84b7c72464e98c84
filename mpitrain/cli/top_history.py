"""What the ranks of a job have done in the last seconds, and which of them holds up the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Order = Literal["slowest", "rank", "host"]

_SECONDS = 10.0
# In these a rank does not go on by itself, or nobody knows whether it does.
MARKED = ("stopped", "disk", "failed", "ended", "unknown")
_WAITING = ("waits", "wire", "done", "lost", "paused")


def in_pause(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a look in which ranks that wait in a pause are not busy but "paused". The head has who paused them."""
    if not answer.get("paused"):
        return answer
    ranks = [
        {**entry, "phase": "paused", "call": ""}
        if entry["phase"] == "busy" and entry["call"].startswith("a pause ")
        else entry
        for entry in answer["ranks"]
    ]
    return {**answer, "ranks": ranks}


class TopHistory:
    """The looks of the last 10 s."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, str, Mapping[int, str]]] = deque()

    def add(self, answer: Mapping[str, Any]) -> None:
        """Take in a look. Another try of the job begins anew."""
        phases = {entry["rank"]: entry["phase"] for entry in in_pause(answer)["ranks"]}
        at = answer["at"]
        while self._looks and (
            self._looks[0][1] != answer["job"] or not at - _SECONDS <= self._looks[0][0] <= at  # or the clock was set
        ):
            self._looks.popleft()
        self._looks.append((at, answer["job"], phases))

    def shares(self, rank: int) -> dict[str, float]:
        """Return the share of the looks in which the rank was in each phase."""
        counts = Counter(phases[rank] for _, _, phases in self._looks if rank in phases)
        return {phase: count / counts.total() for phase, count in counts.items()}

    def sort(self, ranks: Sequence[Mapping[str, Any]], order: Order) -> list[Mapping[str, Any]]:
        """Return the ranks in this order. The slowest one is that which has waited least for the others."""

        def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
            if order == "host":
                return entry["host"], entry["rank"]
            if order == "rank":
                return (entry["rank"],)
            waited = sum(share for phase, share in self.shares(entry["rank"]).items() if phase in _WAITING)
            return entry["phase"] not in MARKED, entry["step"], round(waited, 2), entry["rank"]

        return sorted(ranks, key=key)
