"""A try of a job, as its guards let it be watched (live.py)."""

from __future__ import annotations

import time
from typing import Any

from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.live_picture import of_ranks
from mpitrain.launch.roster import served
from mpitrain.launch.silence import SILENCE_SECONDS
from mpitrain.launch.watch import Guards


class LiveTry:
    """See live.Watchable."""

    def __init__(self, job: JobSpec, guards: Guards) -> None:
        self._placement, self._guards = job.placement, guards
        self._has_servers = bool(job.context.servers)

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
        picture = of_ranks(views, places, silence)
        first = next((entry for entry in picture["ranks"] if entry["rank"] == 0), None)
        if self._has_servers and first is not None and first["host"] == self._placement.own and first["pid"]:
            picture["served"] = served(first["pid"]) or None
        return picture
