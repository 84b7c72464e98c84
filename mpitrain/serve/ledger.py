"""What a server has seen: jobs, samples and speed of each worker, the staleness of gradients, bytes in and out."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class WorkerTally:
    """What one worker has done.

    Attributes:
        name: as in messages, such as "worker 2 on lab1".
        host: as it says itself.
        jobs, samples: answers that were used, and their samples.
        dropped, refused: answers that came too late, and answers that could not be used.
        seconds: from the moment in which a job went out until its answer came, over all answers that were used.
        waited_seconds: in which it had no job, before each of its jobs.
        pulled_bytes, pushed_bytes: of parameters and gradients, without headers.
        is_here: the worker has not gone.
    """

    name: str
    host: str = ""
    jobs: int = 0
    samples: int = 0
    dropped: int = 0
    refused: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    is_here: bool = True

    @property
    def samples_per_second(self) -> float:
        """The speed of the worker while it has jobs; 0 before its first answer."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass
class ServerTally:
    """The bytes of gradients and parameters that one server has taken in and sent out, without headers."""

    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class ServerLedger:
    """The tallies of one life of a server.

    Attributes:
        workers: all that have joined, also those that are gone.
        servers: the first one, and the others if there are more.
        staleness: how many updates were made between pull and push, with the number of gradients.
        updates: the number of updates.
    """

    workers: list[WorkerTally] = field(default_factory=list)
    servers: list[ServerTally] = field(default_factory=lambda: [ServerTally()])
    staleness: Counter[int] = field(default_factory=Counter)
    updates: int = 0

    @property
    def bytes_in(self) -> int:
        """Of gradients to all servers, without headers."""
        return sum(one.pushed_bytes for one in self.workers)

    @property
    def bytes_out(self) -> int:
        """Of parameters from all servers, without headers."""
        return sum(one.pulled_bytes for one in self.workers)

    def plain(self) -> dict[str, Any]:
        """Return all tallies, as JSON can hold them."""
        workers = [{**asdict(one), "samples_per_second": one.samples_per_second} for one in self.workers]
        return {
            "workers": workers,
            "servers": [asdict(one) for one in self.servers],
            "staleness": {str(staleness): self.staleness[staleness] for staleness in sorted(self.staleness)},
            "updates": self.updates,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }

    def line(self) -> str:
        """Return the tallies in a line for the end of a run."""
        jobs, gone = sum(one.jobs for one in self.workers), sum(not one.is_here for one in self.workers)
        counts = [
            f"{jobs:,} jobs",
            f"{self.updates:,} updates",
            f"{sum(one.dropped for one in self.workers):,} answers too late",
            f"{sum(one.refused for one in self.workers):,} refused",
        ]
        most = max(self.staleness, default=0)
        return (
            f"{len(self.workers)} workers ({gone} gone), {', '.join(counts)}, staleness up to {most}, "
            f"{self.bytes_in / 1e6:,.1f} MB in, {self.bytes_out / 1e6:,.1f} MB out"
        )
