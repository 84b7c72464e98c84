"""Every process of a job, found and ended by its descent from this one; never by name.

This process becomes the "child subreaper": an orphan below it becomes its child instead of init's, so that no
process of the job leaves the tree, whatever mpiexec or a rank does. Linux only (prctl(2), proc(5)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it. Lasts until the process ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> Callable[[], None]:
    """What a child runs before exec so that it gets SIGTERM when this process dies, even by SIGKILL."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec only the call is safe

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return in_child


def children() -> set[int]:
    """The process ids of this process's own children, zombies included."""
    return set(_children_by_parent()[os.getpid()])


def alive_below(left_out: set[int]) -> set[int]:
    """All processes below this one that are alive, but for its own children `left_out` and what is below them.

    From one look at all processes: between two, an orphan that becomes ours would be in neither.
    """
    below = _children_by_parent()
    descendants: set[int] = set()
    to_do = [pid for pid in below[os.getpid()] if pid not in left_out]
    while to_do:
        pid = to_do.pop()
        if pid not in descendants:
            descendants.add(pid)
            to_do.extend(below[pid])
    return {pid for pid in descendants if _parent(pid) is not None}


def reap(pids: set[int]) -> None:
    """Take the exit codes of those of `pids` that are children of ours and have ended."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def kill_all(find: Callable[[], set[int]], *, timeout_seconds: float = 5.0) -> set[int]:
    """SIGKILL what `find` returns until it returns nothing; gives back what would not die in time.

    Repeated because a process may fork while the others are being killed, and because a child of a killed one
    becomes ours only then.
    """
    deadline = time.monotonic() + timeout_seconds
    while (alive := find()) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        reap(alive)
    return alive


def command_line(pid: int) -> str:
    """The command line of a process, for messages; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _children_by_parent() -> defaultdict[int, list[int]]:
    below: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
        if entry.isdecimal() and (parent := _parent(int(entry), dead_too=True)) is not None:
            below[parent].append(int(entry))
    return below


def _parent(pid: int, *, dead_too: bool = False) -> int | None:
    """The parent of a process; None when it is gone, or a zombie unless `dead_too`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # "pid (name) state ppid ...", where the name may hold spaces and brackets.
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return int(parent) if dead_too or state not in (b"Z", b"X") else None


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
