"""A rank as other processes see it: its record, and the kernel's data about its process.

The text of this module is sent to other hosts. It imports only modules that are sent with it, and runs with an old
Python.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpitrain.watching.proc import opened, read, stat_of
from mpitrain.watching.rank_record import ENDED, STACK_SIGNAL, WAITS, RankRecord

_STACK_SECONDS = 1.0
# A stack is complete when nothing more of it has come for this long: on a busy machine, its writer may have to wait.
_QUIET_SECONDS = 0.15
_STACK_BYTES = 16384
_IDLE_SHARE = 0.02


@dataclass(frozen=True)
class RankView:
    """What is known about a rank on its host.

    Attributes:
        record: the last record of the rank.
        pid: the number of its process on the host. 0: the process has no number there.
        seconds: how long the rank has waited while nothing moved. 0: the rank does not wait.
        state: the state of its process, as ps names it. "": not checked.
        kernel: the place in the kernel where a process in state D waits.
        stack: faulthandler's text of all threads of the rank.
        ended_seconds: how long ago its process ended. None: the process has not ended.
        is_orphan: the process that started the rank has ended, and the rank has not.
        host: the host of the rank. "": the host that wrote this.
        doing_seconds: how long the rank has done what its record says.
        reads: a number that grows while the process reads files, as in imports; 0: not checked.
        idle_seconds: for a rank that has not called init(): how long it has used no processor and read nothing.
        code: the exit code of its process, or minus the number of the signal; None: it runs, or the code is not known.
        traceback: for a rank that failed before init(), or never calls it: the traceback in its error file.
        recorded: its last calls of NCCL (flight_recorder.py), where somebody has looked.
    """

    record: RankRecord
    pid: int
    seconds: float = 0.0
    state: str = ""
    kernel: str = ""
    stack: str = ""
    ended_seconds: float | None = None
    is_orphan: bool = False
    host: str = ""
    doing_seconds: float = 0.0
    reads: int = 0
    idle_seconds: float = 0.0
    code: int | None = None
    traceback: str = ""
    recorded: Sequence[dict[str, Any]] = ()

    @property
    def waits(self) -> bool:
        """True if the rank waits for other ranks, and could continue if they came."""
        return self.record.status in (WAITS, ENDED) and self.state in ("R", "S")


def to_json(view: RankView) -> dict[str, Any]:
    """The text of a view, to send to another host."""
    return {**vars(view), "record": vars(view.record)}


def from_json(fields: Mapping[str, Any], host: str) -> RankView:
    """The view in a text from `host`."""
    return RankView(**{**fields, "record": RankRecord(**fields["record"]), "host": host})


def waited(record: RankRecord, now: float) -> float:
    """The time for which a rank has waited, in seconds."""
    return now - record.since if record.status in (WAITS, ENDED) else 0.0


def look_at(views: Iterable[RankView], *, is_whole: bool = False) -> list[RankView]:
    """Observe these ranks of this host again, in order, with the kernel's data about their processes, and with stacks.

    All ranks that do not wait are asked for their stacks, and so is the first rank that waits; with `is_whole`, all.
    """
    views = sorted(views, key=lambda view: view.record.rank)
    asked: dict[int, tuple[int, int]] = {}
    has_one_that_waits = False
    for view in views:
        # The process id of one that has ended may belong to another process by now.
        waits = view.record.status in (WAITS, ENDED)
        if view.ended_seconds is not None or (waits and has_one_that_waits and not is_whole):
            continue
        has_one_that_waits = has_one_that_waits or view.record.status == WAITS
        stacks = view.record.stacks if view.record.stacks >= 0 else _stacks_of(view.pid)
        asked[view.record.rank] = (view.pid, stacks)
    texts = read_stacks(asked)
    seen = []
    for view in views:
        state = state_of(view)
        kernel = read(f"/proc/{view.pid}/wchan").decode(errors="replace") if state == "D" else ""
        stack = texts.get(view.record.rank, "")
        seen.append(
            replace(
                view,
                seconds=round(view.seconds, 1),
                state=state,
                kernel=kernel,
                stack=stack,
                reads=num_reads(view.pid) if view.pid else 0,
            )
        )
    return seen


def state_of(view: RankView) -> str:
    """The state of the rank's process now, as process_state says it."""
    if view.ended_seconds is not None:
        return "gone"
    return process_state(view.pid) if view.pid else "S"  # without a number here it has no entry in /proc


def read_stacks(asked: dict[int, tuple[int, int]]) -> dict[int, str]:
    """The Python stacks of these ranks, given as (pid, descriptor). A rank that does not answer in 1 s is left out."""
    begun = {}
    for rank, (pid, descriptor) in asked.items():
        # Without a handler the signal would end the process; a stopped one cannot answer.
        if descriptor < 0 or process_state(pid) in ("T", "t", "gone") or not _catches(pid, int(STACK_SIGNAL)):
            continue
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        with contextlib.suppress(OSError):
            begun[rank] = (path, path.stat().st_size)
            os.kill(pid, STACK_SIGNAL)
    texts: dict[int, str] = {}
    grown: dict[int, tuple[int, float]] = {}  # by rank: the size of its file, and since when the size is unchanged
    deadline = time.monotonic() + _STACK_SECONDS
    while len(texts) < len(begun) and time.monotonic() < deadline:
        time.sleep(0.03)
        for rank, (path, before) in begun.items():
            with contextlib.suppress(OSError):
                size, now = path.stat().st_size, time.monotonic()
                if size != grown.get(rank, (before, now))[0]:
                    grown[rank] = (size, now)
                elif rank in grown and rank not in texts and now - grown[rank][1] >= _QUIET_SECONDS:
                    with path.open("rb") as file:
                        file.seek(before)
                        texts[rank] = file.read(_STACK_BYTES).decode(errors="replace")
    return texts


def num_reads(pid: int) -> int:
    """A number that grows while this process reads files or maps them, as in imports; 0: the kernel does not tell."""
    calls = [int(line.split()[1]) for line in read(f"/proc/{pid}/io").splitlines() if line.startswith(b"syscr:")]
    fields = stat_of(pid)
    return sum(calls) + (int(fields[9]) if fields else 0)  # with the pages that came from a disk: proc(5), majflt


class Idleness:
    """For how long a process has used no processor and read nothing, including child processes of its own program, such
    as those that load its data. A child that collects metrics or serves logs is another program, and never idle.

    The threads of libraries wake up now and then, so less than `_IDLE_SHARE` of a core counts as nothing.
    """

    def __init__(self) -> None:
        self._since, self._used = 0.0, -1

    def look(self, pid: int) -> float:
        """Return the seconds. Call this every second or so."""
        now, used, is_busy = time.monotonic(), 0, False
        program = _program(pid)
        for one in (pid, *(child for child in _below(pid) if _program(child) == program)):
            fields = stat_of(one)
            if fields:
                used += int(fields[11]) + int(fields[12]) + num_reads(one)
                is_busy = is_busy or fields[0] == b"R"  # on a busy machine it may get no core for long
        allowed = _IDLE_SHARE * os.sysconf("SC_CLK_TCK") * (now - self._since) + 1
        if is_busy or not self._since or not 0 <= used - self._used <= allowed:
            self._since, self._used = now, used
        return now - self._since


def _below(pid: int) -> list[int]:
    """Return the descendants of this process."""
    found: list[int] = []
    for task in _names(f"/proc/{pid}/task"):
        for child in read(f"/proc/{pid}/task/{task}/children").split():
            found += [int(child), *_below(int(child))]
    return found


def _program(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208
    except OSError:
        return []


def _stacks_of(pid: int) -> int:
    """The descriptor into which a process writes its stacks since it has imported mpitrain (early.py); -1: none."""
    found = (int(path.rpartition("/")[2]) for path, what in opened(pid) if what.startswith("/memfd:mpitrain-stacks"))
    return next(found, -1)


def process_state(pid: int) -> str:
    """The state of a process as ps names it: R runs, S sleeps, D waits for a disk or network file system, T is
    stopped."""
    fields = stat_of(pid)
    return fields[0].decode() if fields else "gone"


def process_numbering() -> int:
    """The PID namespace of this process. A container mostly has a namespace other than the machine's."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # /proc is another container's
        return 0


def _catches(pid: int, number: int) -> bool:
    for line in read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
