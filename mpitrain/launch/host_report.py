"""What the launcher knows of a host while a job runs there: the reports of the host's guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, CALLED, DONE, FAILED
from mpitrain.watching.view import RankView

# When a rank's process ends, mpiexec ends the job within milliseconds. Sometimes MPICH's does not, and waits for ever.
_VANISHED_SECONDS = 10.0


@dataclass
class HostReport:
    """What is known of a host while the job runs."""

    ranks: dict[int, RankView] = field(default_factory=dict)  # ranks that have appeared there, as last seen
    ranks_at: float = 0.0  # when the guard has last said what its ranks do, by time.monotonic() here
    load: Mapping[str, Any] | None = None  # how busy the host is, as load.Load says it
    load_at: float = 0.0  # when the guard has said so, by time.monotonic() here
    seen: list[RankView] | None = None  # its ranks with their stacks, on request; None: no answer yet
    first_end: FirstEnd | None = None  # the first end there, of a rank or of a process that started ranks
    processes: list[tuple[int, str, str]] | None = None  # id, state, command line
    unreachable: list[str] = field(default_factory=list)  # hosts to which it cannot connect on high ports
    is_lost: bool = False  # somebody removed the roll call there
    left: list[tuple[int, str]] | None = None  # processes that had to be ended; None: no answer yet
    immortal: list[tuple[int, str]] = field(default_factory=list)
    has_vanished: bool = False  # it fell silent, or its guard ended
    paths: dict[str, list[str]] | None = None  # what facts.look_at_paths says there, on request; None: no answer yet
    files: list[tuple[str, int]] = field(default_factory=list)  # the job's files there: path and inode
    since: float = 0.0  # when the job began there, by that host's time.time()

    def kernel(self, rank: int | None) -> str:
        """Return what the kernel says of the end of `rank`, or of the ranks' starter (None); "" if it was not first."""
        first = self.first_end
        return first.kernel if first is not None and first.rank == rank else ""

    def take(self, message: Mapping[str, Any]) -> None:
        """Take in a message of the host's guard. Guards handles the ranks and the clock."""
        if "first_end" in message:
            self.first_end = None if message["first_end"] is None else FirstEnd(**message["first_end"])
        if "files" in message:
            self.files, self.since = [tuple(file) for file in message["files"]], message["since"]
        if "paths" in message:
            self.paths = message["paths"]
        if "processes" in message:
            self.processes = [tuple(entry) for entry in message["processes"]]
            self.unreachable = message["unreachable"]
        if "ended" in message:
            self.is_lost = message["lost"]
            self.immortal = [tuple(entry) for entry in message["immortal"]]
            self.left = [tuple(entry) for entry in message["ended"]]

    def orphans(self) -> list[int]:
        """Return the ranks that live on although their starter, a daemon of mpiexec, has ended."""
        return [rank for rank, view in sorted(self.ranks.items()) if view.is_orphan]

    def vanished(self, *, recovers: bool = False) -> list[int]:
        """Return the ranks that ended before their time, unseen by mpiexec: before the programs of all ranks had.

        If the job `recovers`, a rank that ended after init() does not count: the others go on without it, as soon as
        each of them has come to its next call.
        """
        phases = (CALLED, FAILED) if recovers else (CALLED, BEGUN, DONE, FAILED)
        return [
            rank
            for rank, view in sorted(self.ranks.items())
            if view.ended_seconds is not None and view.ended_seconds > _VANISHED_SECONDS and view.record.phase in phases
        ]
