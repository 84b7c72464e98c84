"""Every process of a job, found and ended by its descent from this process; never by name.

This process becomes the "child subreaper": an orphan below it becomes its child instead of init's. So no process of the
job leaves the tree, whatever mpiexec or a rank does. Linux only (prctl(2), proc(5)).

Sent to other hosts as text. So this module imports only the modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpitrain.job.context import JOB

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Children of this process that a thread has started beside a job. The thread holds the lock while it starts them and
# leaves them out, so that a look at all children never takes them for processes of the job.
_left_out: set[int] = set()
STARTING = threading.Lock()


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, until it ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> Callable[[], None]:
    """Return what a child runs before exec, so that it gets SIGTERM when this process dies, even by SIGKILL."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here, because only the call is safe between fork and exec

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died in between
            os._exit(1)

    return in_child


def children() -> set[int]:
    """Return the process ids of this process's own children, zombies included."""
    return set(_children_by_parent()[os.getpid()])


@contextmanager
def left_out(pids: set[int]) -> Iterator[None]:
    """Inside, these children of this process are none of a job."""
    _left_out.update(pids)
    try:
        yield
    finally:
        _left_out.difference_update(pids)


def alive_below(not_ours: set[int], job: str = "") -> set[int]:
    """Return all living processes below this one, except its own children `not_ours` and their descendants.

    Children with the mark of another job than `job` are left out too, if this one has an id.

    All come from one look at /proc: between two looks, an orphan that becomes this process's child would be in neither.
    """
    with STARTING:
        below, beside = _children_by_parent(), not_ours | _left_out
    descendants: set[int] = set()
    to_do = [pid for pid in below[os.getpid()] if pid not in beside and not _is_of_another(pid, job)]
    while to_do:
        pid = to_do.pop()
        if pid not in descendants:
            descendants.add(pid)
            to_do.extend(below[pid])
    return {pid for pid in descendants if _parent(pid) is not None}


def reap(pids: set[int]) -> None:
    """Collect the exit codes of those of `pids` that are ended children of this process."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def kill_all(find: Callable[[], set[int]], *, timeout_seconds: float = 5.0) -> set[int]:
    """SIGKILL what `find` returns until `find` returns nothing. Return the processes that would not die in time.

    Repeated because a process may fork while the others are being killed, and because a child of a killed process
    becomes this process's child only then.
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
    """Return the command line of a process, for messages; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _is_of_another(pid: int, job: str) -> bool:
    mark = f"{JOB}=".encode()
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if job else ()
    except OSError:
        return False
    return any(word.startswith(mark) and word != mark + job.encode() for word in words)


def _children_by_parent() -> defaultdict[int, list[int]]:
    below: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
        if entry.isdecimal() and (parent := _parent(int(entry), dead_too=True)) is not None:
            below[parent].append(int(entry))
    return below


def _parent(pid: int, *, dead_too: bool = False) -> int | None:
    """Return the parent of a process; None if the process is gone, or a zombie (unless `dead_too`)."""
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
