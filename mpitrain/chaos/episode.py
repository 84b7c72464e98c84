"""The faults that chaos made, and what it saw of the job."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain.chaos.plan import Fault
from mpitrain.chaos.timeline import Point, WentOn


@dataclass
class Hit:
    """A fault as it was made.

    Attributes:
        fault: as planned.
        seconds: when it was made, after the start of chaos.
        rank: the rank that it hit; None: more than one rank, or none.
        host: the host that it hit.
        attempt: the job's attempt that it hit.
        step: the last step that the victim had begun; None: not known yet.
        deed: the fault, in words.
        why_not: why the fault was not made; "": it was made.
        is_undone: the fault is not in force any more.
        went_on: how the job went on; None: it has not gone on yet.
    """

    fault: Fault
    seconds: float
    rank: int | None
    host: str
    attempt: int
    step: int | None = None
    deed: str = ""
    why_not: str = ""
    is_undone: bool = True
    went_on: WentOn | None = None

    @property
    def victim(self) -> str:
        """Text such as "rank 2 on node1"."""
        return self.host if self.rank is None else f"rank {self.rank} on {self.host}"


@dataclass
class Episode:
    """What was seen of a job under chaos.

    Attributes:
        points: in order of time.
        hits: the faults.
        said: lines of the launcher about the job, with the time at which each was seen.
        hears: whether the launcher's output can be read.
        seconds: how long chaos took.
        has_ended: whether the job is over.
        news: what became of the connections to hosts, with the time of each line.
        unseen: the hosts on which the last ranks may not have been seen.
        error: why the job has failed, as far as its hosts were seen; "": the job has not failed.
        left: what is left of the job, by host.
    """

    points: list[Point] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    hears: bool = False
    seconds: float = 0.0
    has_ended: bool = False
    news: list[tuple[float, str]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    error: str = ""
    left: dict[str, list[str]] = field(default_factory=dict)
