"""The statistics of a server, and what `mpitrain ps` shows of them: workers, queue, staleness, bytes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from mpitrain.watching.activity import own_activity

if TYPE_CHECKING:
    from mpitrain.server.registry import Member, WorkerRegistry

# A text of 100 workers takes 0.5 ms.
_EVERY_SECONDS = 1.0
# The speed is measured over this many samples, each a second or more after the previous one, with new answers.
_LOOKS = 11
# A run may have many workers that are gone. Those that joined last are shown, the others only in the sum.
_MOST_GONE = 100


@dataclass
class WorkerStats:
    """The statistics of one worker.

    Attributes:
        name: as in messages, such as "worker 2 on lab1".
        host: as it says itself.
        units, samples: answers that were used, and their samples.
        dropped, refused: answers that came too late, and answers that could not be used.
        seconds: from the moment in which a unit went out until its answer came, over all answers that were used.
        waited_seconds: the time without a unit, before each of its units.
        pulled_bytes, pushed_bytes: of parameters and gradients, without headers.
        is_here: the worker has not gone.
    """

    name: str
    host: str = ""
    units: int = 0
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
        """The speed of the worker while it has units; 0 before its first answer."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass
class ByteCounts:
    """The bytes of gradients and parameters that one server has taken in and sent out, without headers."""

    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class ServerStats:
    """The statistics of one life of a server.

    Attributes:
        workers: all that have joined, also those that are gone.
        servers: the first one, and the others if there are more.
        staleness: how many updates were made between pull and push, with the number of gradients.
        updates: the number of updates.
    """

    workers: list[WorkerStats] = field(default_factory=list)
    servers: list[ByteCounts] = field(default_factory=lambda: [ByteCounts()])
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
        """Return all numbers, as JSON values."""
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
        """Return the sums in a line for the end of a run."""
        units, gone = sum(one.units for one in self.workers), sum(not one.is_here for one in self.workers)
        counts = [
            f"{units:,} work units",
            f"{self.updates:,} updates",
            f"{sum(one.dropped for one in self.workers):,} answers too late",
            f"{sum(one.refused for one in self.workers):,} refused",
        ]
        most = max(self.staleness, default=0)
        return (
            f"{len(self.workers)} workers ({gone} gone), {', '.join(counts)}, staleness up to {most}, "
            f"{self.bytes_in / 1e6:,.1f} MB in, {self.bytes_out / 1e6:,.1f} MB out"
        )


class ServerStatus:
    """Publishes the state of a Coordinator in the record of its process, if the process has one."""

    def __init__(self, registry: WorkerRegistry, parts: Callable[[], list[dict[str, Any]]]) -> None:
        """`parts`: see Shards.parts."""
        self._registry, self._parts, self._now = registry, parts, registry.rules.now
        self._written, self._shown = float("-inf"), (0, 0)
        self._looks: deque[tuple[float, int]] = deque([(self._now(), 0)], _LOOKS)
        self._activity, self._stage, self._has_failed = own_activity(), "runs", False

    def show(self) -> None:
        """Publish the state, unless that was done a moment ago and no worker has joined or left since."""
        now, registry = self._now(), self._registry
        there = len(registry.stats.workers), len(registry.here)
        if self._activity is not None and (now - self._written >= _EVERY_SECONDS or there != self._shown):
            self._written, self._shown = now, there
            self._activity.serve(self._facts(now))

    def enter(self, stage: Literal["leaves", "over"], *, has_failed: bool) -> None:
        """Publish that the run is over or has failed: workers are being told, or all have left."""
        self._stage, self._has_failed, self._written = stage, has_failed, float("-inf")
        self.show()

    def _facts(self, now: float) -> dict[str, Any]:
        """Return all, as JSON can hold it. `at`: now, by time.monotonic()."""
        stats, here = self._registry.stats, self._registry.here.values()
        gone = [one for one in stats.workers if not one.is_here]
        busy = self._registry.queue.out()
        workers = [{**_plain(one.stats), **_doing(one, busy, now)} for one in here]
        workers += [{**_plain(one), "state": "gone"} for one in gone[-_MOST_GONE:]]
        everyone = {**_sums(stats.workers), "pulled_bytes": stats.bytes_out, "pushed_bytes": stats.bytes_in}
        return {
            "at": now,
            "stage": self._stage,
            "has_failed": self._has_failed,
            "servers": len(stats.servers),
            "parts": self._parts(),
            "expected": self._registry.rules.expected,
            "joined": len(stats.workers),
            "here": len(here),
            "workers": workers,
            "all": {**everyone, "samples_per_second": self._speed(now)},
            "queue": self._registry.queue.summary(),
            "staleness": {str(staleness): stats.staleness[staleness] for staleness in sorted(stats.staleness)},
        }

    def _speed(self, now: float) -> float:
        """Return the samples a second of all workers, since about ten seconds or ten answers.

        A silence that is longer than those between the answers before counts too, so the speed falls when answers end.
        """
        looks, samples = self._looks, sum(one.samples for one in self._registry.stats.workers)
        silent = now - looks[-1][0]
        longest = max((later - earlier for (earlier, _), (later, _) in pairwise(looks)), default=0.0)
        if not samples:
            looks[0] = now, 0  # the wait for the first worker is not its speed
        elif silent >= _EVERY_SECONDS and (samples != looks[-1][1] or silent > longest):
            looks.append((now, samples))
        (begin, before), (end, after) = looks[0], looks[-1]
        return (after - before) / (end - begin) if end > begin else 0.0


def _plain(stats: WorkerStats) -> dict[str, Any]:
    return {
        "name": stats.name.removesuffix(f" on {stats.host}"),
        "host": stats.host,
        **_sums([stats]),
        "samples_per_second": stats.samples_per_second,
    }


def _sums(all_stats: Collection[WorkerStats]) -> dict[str, int]:
    names = ("units", "samples", "pulled_bytes", "pushed_bytes", "refused", "dropped")
    return {name: sum(getattr(one, name) for one in all_stats) for name in names}


def _doing(member: Member, busy: Collection[object], now: float) -> dict[str, Any]:
    """Return what a worker is doing, and for how long; no time for one that has not asked for a unit yet."""
    if member.waits_since is not None:
        return {"state": "waits", "seconds": now - member.waits_since}
    if member.is_overdue or member.is_silent:
        return {"state": "overdue", "seconds": now - member.unit_since}
    if member.peer in busy:
        return {"state": "computes", "seconds": now - member.unit_since}
    return {"state": "joins"}
