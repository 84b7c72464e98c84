"""A try of a job, as its guards let it be watched (live.py)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.live_picture import of_ranks
from mpitrain.launch.roster import served
from mpitrain.launch.silence import SILENCE_SECONDS
from mpitrain.launch.watch import Guards
from mpitrain.watching.doing import SEEN_ONLY

# A load is said every second; an older one is of a time when nobody watched, or of a silent host.
_OLD_SECONDS = 5.0


class LiveTry:
    """See live.Watchable."""

    def __init__(self, job: JobSpec, guards: Guards) -> None:
        self._placement, self._guards = job.placement, guards
        self._has_servers = bool(job.context.servers)
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its phase, and since when this was seen

    def watch(self, seconds: float) -> None:
        """See live.Watchable."""
        self._guards.watch(seconds)

    def looked(self) -> float:
        """See live.Watchable."""
        hosts = self._guards.hosts_now()
        return min(
            (report.ranks_at for host, (report, silent) in hosts.items() if silent < SILENCE_SECONDS),
            default=time.monotonic(),
        )

    def picture(self) -> dict[str, Any]:
        """See live.Watchable."""
        hosts = self._guards.hosts_now()
        views = [view for report, _ in hosts.values() for view in report.ranks.values()]
        places = {place.host: place.ranks for place in self._placement.places}
        silence = {host: silent for host, (_, silent) in hosts.items()}
        now = time.monotonic()
        loads = {
            host: report.load
            for host, (report, _) in hosts.items()
            if report.load is not None and now - report.load_at < _OLD_SECONDS
        }
        picture = of_ranks(views, places, silence, loads)
        self._set_since(picture["ranks"])
        first = next((entry for entry in picture["ranks"] if entry["rank"] == 0), None)
        if self._has_servers and first is not None and first["host"] == self._placement.own and first["pid"]:
            picture["served"] = served(first["pid"]) or None
        return picture

    def _set_since(self, ranks: Iterable[dict[str, Any]]) -> None:
        """A rank says since when it works or waits, but not since when it is stopped, or its host is silent."""
        now = time.monotonic()
        for entry in ranks:
            phase, since = self._seen.get(entry["rank"], ("", now))
            if phase != entry["phase"]:
                phase, since = self._seen[entry["rank"]] = entry["phase"], now
            if phase in SEEN_ONLY:
                entry["since"] = round(now - since, 1)
