"""Which step each rank is in, for `mpitrain run --restarts`: in a file beside the roll call, on every host of the job.

A rank has a line of fixed length there and overwrites it when it begins a step: one write of 64 bytes, which is still
there when the rank has been killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from mpitrain.launch.guard import steps_path

_LINE_BYTES = 64


@dataclass(frozen=True)
class Report:
    """What a rank has said last.

    Attributes:
        pid: its process.
        first: the first step that it began; 1, unless it went on from a checkpoint.
        step: the last step that it began.
    """

    pid: int
    first: int
    step: int


@cache  # one open file for a process, however many Trainers it makes
def reporter(roll_call: str, rank: int) -> Callable[[int], None]:
    """What a rank calls with the number of each step that it begins; without a launcher it does nothing."""
    first: int | None = None
    descriptor: int | None = None
    # Not created: on another machine the path leads nowhere, or the launcher has gone.
    with suppress(FileNotFoundError):
        descriptor = os.open(steps_path(roll_call), os.O_WRONLY) if roll_call else None

    def report(step: int) -> None:
        nonlocal first
        if descriptor is None:
            return
        first = step if first is None else first
        line = f"{rank} {os.getpid()} {first} {step}".ljust(_LINE_BYTES - 1) + "\n"
        with suppress(OSError):  # a full /tmp must not end a training
            os.pwrite(descriptor, line.encode(), rank * _LINE_BYTES)

    return report


def read_reports(text: str) -> dict[int, Report]:
    """What the text of such a file says, by rank. Ranks of other hosts have left holes, zeros, in it."""
    found = {}
    for line in text.replace("\0", "").splitlines():
        rank, pid, first, step = map(int, line.split())
        found[rank] = Report(pid, first, step)
    return found


def last_step(reports: Mapping[int, Report], rank: int | None = None) -> int | None:
    """The step in which the job was; that of `rank` where it is known who failed. None: no rank has begun one.

    Ranks that wait for each other are in one step, but the others may be about to begin the next one.
    """
    if rank is not None and rank in reports:
        return reports[rank].step
    return max((report.step for report in reports.values()), default=None)
