"""How a job ended, and why, in one line. Pure functions of what was seen; mpiexec's own words are a part of that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mpitrain.watching.census import FirstEnd
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import RankRecord

_LINE_BYTES = 300  # of a cause
# Measured on 4 hosts on two busy cores: after a rank was killed, MPICH's processes on the other hosts were
# seen to end 0.2 to 53 ms later; after a daemon of Open MPI was, the first rank 0.28 s later.
_UNSURE_SECONDS = 0.1

# MPICH names a process, Intel MPI the rank too; both name ranks that they have ended themselves.
_HYDRA = re.compile(r"=   (?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)\n=   (EXIT CODE|KILLED BY SIGNAL): (\d+)")
# MPICH's exit code may be the number of a signal: the line that says so is missing where its proxies fail as well.
_FATAL = ("4", "6", "7", "8", "9", "11", "15")
_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")
# Open MPI 4 and 5.
_OPEN_MPI_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
_OPEN_MPI_DAEMON = re.compile(r"Remote daemon: .* on node (\S+)")
_OPEN_MPI_LEFT = re.compile(r"Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)")


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: its exit code.
        is_interrupted: a signal to the launcher ended it.
        trouble: why the launcher ended it, a line each.
        lost: the hosts that vanished.
        failed: what the rank that failed first has said last.
        mpiexec_said: the last of it.
        mpiexec_signal: that ended mpiexec itself, and was not ours; 0: none.
        missing: the ranks that began and did not come to their end.
        first_dead: the rank that died first on each host where that is known; the first of all first.
        orphaned: ranks of a host where what had started them ended before all of them; the first such host's.
        records: what each rank has said last.
    """

    code: int
    is_interrupted: bool = False
    trouble: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    failed: RankRecord | None = None
    mpiexec_said: str = ""
    mpiexec_signal: int = 0
    missing: tuple[int, ...] = ()
    first_dead: tuple[int, ...] = ()
    orphaned: tuple[int, ...] = ()
    records: Mapping[int, RankRecord] = field(default_factory=dict)


def why(ended: Ended, host_of: Callable[[int], str]) -> tuple[str, int | None]:
    """Why a job failed, in a line, and the rank that failed first, where that is known; `host_of` a rank."""
    text, rank = _why(ended, host_of)
    return text[:_LINE_BYTES], rank


def _why(ended: Ended, host_of: Callable[[int], str]) -> tuple[str, int | None]:
    if ended.lost:
        return f"{' and '.join(ended.lost)} fell silent", None
    if ended.trouble:
        return ended.trouble[0], None
    if ended.failed is not None:
        failed = ended.failed
        return f"rank {failed.rank} on {host_of(failed.rank)} failed: {failed.error}", failed.rank
    if ended.mpiexec_signal:
        return f"mpiexec itself was killed by signal {ended.mpiexec_signal}", None
    if daemon := _OPEN_MPI_DAEMON.search(ended.mpiexec_said):
        return f"the process of mpiexec on {daemon[1]} was killed, or has crashed, or cannot be reached", None
    if ended.orphaned:
        first = ended.orphaned[0]
        ranks = f"rank{'s' * (len(ended.orphaned) > 1)} {rank_ranges(ended.orphaned)}"
        return f"the process of mpiexec on {host_of(first)} that started {ranks} was killed, or has crashed", None
    told = _told(ended, host_of)
    rank = _first(ended, set(told))
    if rank is None and len(told) == 1:
        (named,) = told
        return f"rank {named} on {host_of(named)} or another one {told[named]}", None
    if rank is not None:
        how = told.get(rank, f"was killed, or left without a word; mpiexec ended with code {ended.code}")
        return f"rank {rank} on {host_of(rank)} {how}", rank
    return f"the job ended with exit code {ended.code}", None


def _first(ended: Ended, told: set[int]) -> int | None:
    """The rank that failed first, if it is known; `told` are those of which mpiexec speaks."""
    if ended.first_dead:
        return ended.first_dead[0]
    if len(told) == 1 and (len(ended.records) == 1 or not _HYDRA.search(ended.mpiexec_said)):
        return next(iter(told))
    return ended.missing[0] if len(ended.missing) == 1 else None


def _told(ended: Ended, host_of: Callable[[int], str]) -> dict[int, str]:
    """What mpiexec says of ranks. Those that it ended itself, because of another one, may be among them."""
    said = ended.mpiexec_said
    told = {int(rank): f"was killed by signal {number}" for rank, number in _OPEN_MPI_KILLED.findall(said)}
    told |= {int(rank): f"left with exit code {code}" for rank, code in _OPEN_MPI_LEFT.findall(said)}
    for named, pid, host, kind, number in _HYDRA.findall(said):
        # A process id alone may stand for processes of several hosts.
        ranks = [rank for rank, record in ended.records.items() if record.pid == int(pid)]
        ranks = [int(named)] if named else [rank for rank in ranks if len(ranks) == 1 or host_of(rank) == host]
        words = _SIGNAL.search(said)
        if kind == "KILLED BY SIGNAL" or words:
            how = f"was killed by signal {words[1] if words else number}"
        elif number in _FATAL:
            how = f"was killed by signal {number}, or left with exit code {number}"
        else:
            how = f"left with exit code {number}"
        told |= dict.fromkeys(ranks, how)
    return told


def in_order(ends: Iterable[FirstEnd]) -> list[FirstEnd]:
    """What ended first on each host, the first of all first; their times by one clock.

    A host sees each of its own ends in its turn, but how late depends on how busy it is, so the times of two hosts may
    be the wrong way round. Where they are close, the end of a rank comes before that of a process that had started
    ranks: when a rank ends, MPICH's mpiexec lets its processes on the other hosts end before their ranks do, and when
    one of those is killed, it ends no rank before it.
    """
    ends = sorted(ends, key=lambda end: end.seconds)
    close = [end for end in ends if end.seconds - ends[0].seconds < _UNSURE_SECONDS]
    return sorted(close, key=lambda end: end.rank is None) + ends[len(close) :]


def last_step(records: Mapping[int, RankRecord], rank: int | None = None) -> int | None:
    """The step in which the job was; that of `rank` where it is known who failed. None: no rank has begun one.

    Ranks that wait for each other are in one step, but the others may be about to begin the next one.
    """
    if rank is not None and rank in records:
        return records[rank].step or None
    return max((record.step for record in records.values()), default=0) or None


def is_kill(cause: str) -> bool:
    """Whether a failure may be the kernel's answer to too little memory."""
    return "was killed by signal 9" in cause or "was killed, or left" in cause
