"""What the launcher knows of a host of a job while the job runs: what the guard there has said."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, CALLED, FAILED
from mpitrain.watching.view import RankView

# mpiexec ends a job within milliseconds when a rank's process has; now and then MPICH's does not, and waits for ever.
_VANISHED_SECONDS = 10.0


@dataclass
class HostReport:
    """What is known of a host while the job runs."""

    ranks: dict[int, RankView] = field(default_factory=dict)  # that have appeared there, as they were last seen
    seen: list[RankView] | None = None  # its ranks with their stacks, asked for; None: it has not answered
    first_end: FirstEnd | None = None  # there, of a rank or of what started ranks
    processes: list[tuple[int, str, str]] | None = None  # id, state, command line
    unreachable: list[str] = field(default_factory=list)  # hosts to which it cannot connect on high ports
    is_lost: bool = False  # somebody has removed the roll call there
    left: list[tuple[int, str]] | None = None  # that had to be ended; None: it has not said so
    immortal: list[tuple[int, str]] = field(default_factory=list)
    has_vanished: bool = False  # it fell silent, or its guard ended
    files: list[tuple[str, int]] = field(default_factory=list)  # of the job there, path and inode
    since: float = 0.0  # the job's time there, by that host's time.time()

    def kernel(self, rank: int | None) -> str:
        """What the kernel says of the end of `rank`, or of what had started ranks (None); "": it was not the first."""
        first = self.first_end
        return first.kernel if first is not None and first.rank == rank else ""

    def take(self, message: Mapping[str, Any]) -> None:
        """What its guard says of itself; of the ranks and the clock see Guards."""
        if "first_end" in message:
            self.first_end = None if message["first_end"] is None else FirstEnd(**message["first_end"])
        if "files" in message:
            self.files, self.since = [tuple(file) for file in message["files"]], message["since"]
        if "processes" in message:
            self.processes = [tuple(entry) for entry in message["processes"]]
            self.unreachable = message["unreachable"]
        if "ended" in message:
            self.is_lost = message["lost"]
            self.immortal = [tuple(entry) for entry in message["immortal"]]
            self.left = [tuple(entry) for entry in message["ended"]]

    def orphans(self) -> list[int]:
        """The ranks that live on though what started them, a daemon of mpiexec, has ended."""
        return [rank for rank, view in sorted(self.ranks.items()) if view.is_orphan]

    def vanished(self, lost: Collection[int]) -> list[int]:
        """The ranks that ended before their program did, which mpiexec has not seen; without those that are `lost`."""
        return [
            rank
            for rank, view in sorted(self.ranks.items())
            if view.ended_seconds is not None
            and view.ended_seconds > _VANISHED_SECONDS
            and view.record.phase in (CALLED, BEGUN, FAILED)
            and rank not in lost
        ]
