"""How a job ended, and why, in one line. Pure functions of what was seen; mpiexec's own words are a part of that."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mpitrain.launch.steps import Report

_LINE_BYTES = 300  # of a cause

# MPICH names a process, Intel MPI the rank too; both name ranks that they have ended themselves.
_HYDRA = re.compile(r"=   (?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)\n=   (EXIT CODE|KILLED BY SIGNAL): (\d+)")
# MPICH's exit code may be the number of a signal: the line that says so is missing where its proxies fail as well.
_FATAL = ("4", "6", "7", "8", "9", "11", "15")
_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (\d+)\)")
# Open MPI 4 and 5.
_OPEN_MPI_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
_OPEN_MPI_LEFT = re.compile(r"Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)")
# The last line of a traceback; the text of the error may have more lines.
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: its exit code.
        is_interrupted: a signal to the launcher ended it.
        trouble: why the launcher ended it, a line each.
        lost: the hosts that vanished.
        failed: the rank that reported its failure first.
        report: what it wrote.
        mpiexec_said: the last of it.
        missing: the ranks that began and did not come to their end.
        first_dead: the rank that died first on each host where that is known; the first of all first.
        steps: what each rank has said of its steps.
    """

    code: int
    is_interrupted: bool = False
    trouble: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    failed: int | None = None
    report: str = ""
    mpiexec_said: str = ""
    missing: tuple[int, ...] = ()
    first_dead: tuple[int, ...] = ()
    steps: Mapping[int, Report] = field(default_factory=dict)


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
        return f"rank {ended.failed} on {host_of(ended.failed)} failed: {_error(ended.report)}", ended.failed
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
    if len(told) == 1 and (len(ended.steps) == 1 or not _HYDRA.search(ended.mpiexec_said)):
        return next(iter(told))
    return ended.missing[0] if len(ended.missing) == 1 else None


def _told(ended: Ended, host_of: Callable[[int], str]) -> dict[int, str]:
    """What mpiexec says of ranks. Those that it ended itself, because of another one, may be among them."""
    said = ended.mpiexec_said
    told = {int(rank): f"was killed by signal {number}" for rank, number in _OPEN_MPI_KILLED.findall(said)}
    told |= {int(rank): f"left with exit code {code}" for rank, code in _OPEN_MPI_LEFT.findall(said)}
    for named, pid, host, kind, number in _HYDRA.findall(said):
        # A process id alone may stand for processes of several hosts.
        ranks = [rank for rank, report in ended.steps.items() if report.pid == int(pid)]
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


def _error(report: str) -> str:
    """The line with the error, of a traceback."""
    lines = [line for line in report.splitlines() if line and not line.startswith("mpitrain: ")]
    errors = [line for line in lines if _ERROR.fullmatch(line)]
    return (errors or lines or ["without a word"])[-1]


def is_kill(cause: str) -> bool:
    """Whether a failure may be the kernel's answer to too little memory."""
    return "was killed by signal 9" in cause or "was killed, or left" in cause
