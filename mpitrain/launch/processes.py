"""Every process of a job on this host: found and ended by its mark, or by its descent from this process; never by name.

A process has the mark of its job in its environment, and so have its descendants (`Marked`). The launcher becomes the
"child subreaper": an orphan below it becomes its child instead of init's. So no process of the job leaves the tree,
whatever mpiexec or a rank does (`alive_below`). Linux only (prctl(2), proc(5)).

Sent to other hosts as text. So this module imports only the modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpitrain.context import JOB
from mpitrain.reading import whole
from mpitrain.watching.proc import read, stat_of

_KILL_SECONDS = 5.0
_TRIES, _PAUSE_SECONDS = 10, 0.1
_KERNEL = 0x00200000  # PF_KTHREAD of the kernel: a thread of its own


class Marked:
    """The processes of the job with this id, without this process."""

    def __init__(self, token: str, name: str = JOB) -> None:
        """`name` is the variable that holds the id."""
        self._mark = f"{name}={token}".encode()

    def find(self) -> set[int]:
        """Return their process ids, without zombies."""
        children: dict[int, list[int]] = {}
        to_do = []
        for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
            if not entry.isdigit():
                continue
            fields = stat_of(int(entry))
            if not fields or fields[0] in (b"Z", b"X") or int(fields[6]) & _KERNEL:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
            if self._mark in read(f"/proc/{entry}/environ").split(b"\0"):
                to_do.append(int(entry))
        job: set[int] = set()
        while to_do:
            pid = to_do.pop()
            if pid not in job and pid != os.getpid():
                job.add(pid)
                to_do.extend(children.get(pid, []))
        return job

    def end(self, linger_seconds: float) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Let the processes end by themselves for that long, then kill the rest: return these, and immortal ones."""
        until, nap_seconds = time.monotonic() + linger_seconds, 0.02
        while (left := self.find()) and time.monotonic() < until:
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, 0.1)
        killed = [(pid, command_line(pid)) for pid in sorted(left)]
        deadline = time.monotonic() + _KILL_SECONDS
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            left = self.find()
        return killed, [(pid, command_line(pid)) for pid in sorted(left)]


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if the process is gone."""
    return read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def launcher_name(pid: int) -> str:
    """Return what identifies a launcher: host, process id, and start time, so that no later process is taken for it."""
    return f"{socket.gethostname()} {pid} {ticks(pid)}"


def launcher_pid(name: str) -> int | None:
    """Return the launcher's process if it is on this host and alive."""
    host, _, rest = name.partition(" ")
    pid, _, began = rest.partition(" ")
    number = whole(pid, 1, 1 << 31)
    is_it = number is not None and host == socket.gethostname() and ticks(number) == began != ""
    return number if number is not None and is_it and _parent(number) is not None else None


def ticks(pid: int) -> str:
    """Return when a process began, in ticks since the host's start."""
    fields = stat_of(pid)
    return fields[19].decode() if fields else ""


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(OSError):
        Path(path).unlink()


def remove_unheard(path: str) -> None:
    """Remove a socket if nobody listens there any more, and its folder if that is then empty.

    A process that is being killed may still listen for a moment.
    """
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.setblocking(False)
            try:
                line.connect(path)
            except ConnectionRefusedError:
                remove(path)
                with contextlib.suppress(OSError):
                    Path(path).parent.rmdir()
                return
            except OSError:
                return
        time.sleep(_PAUSE_SECONDS)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Children of this process that a thread has started beside a job. The thread holds the lock while it starts them and
# leaves them out, so that a look at all children never takes them for processes of the job.
_left_out: set[int] = set()
STARTING = threading.Lock()


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, until it ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_child(command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    """Start a program that reads nothing and gets SIGTERM when this process dies, even by SIGKILL.

    Call this in a thread that lives as long as the program may: the kernel watches over the thread. `settings` are
    those of Popen. A terminal's Ctrl-C reaches this process only.

    Raises:
        OSError: it cannot be started.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here, because only the call is safe between fork and exec

    def in_child() -> None:  # no thread holds a lock that it takes
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died in between
            os._exit(1)

    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": in_child}
    return subprocess.Popen(command, **{**how, **settings})


def end_with_agent(limit: tuple[int, int]) -> Callable[[], None]:
    """Return what a child of the agent runs before exec: it gets SIGKILL with the agent, and a session of its own.

    `limit` is that of open files, which the agent has raised for itself.
    """
    agent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:
            os._exit(1)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)

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


def start_beside(stack: contextlib.ExitStack, command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    """Start a program as start_child does, which is none of a job until the end of the `stack`. Any thread may call."""
    with STARTING:
        process = start_child(command, **settings)
        stack.enter_context(left_out({process.pid}))
    return process


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


def _is_of_another(pid: int, job: str) -> bool:
    mark = f"{JOB}=".encode()
    words = read(f"/proc/{pid}/environ").split(b"\0") if job else ()
    return any(word.startswith(mark) and word != mark + job.encode() for word in words)


def _children_by_parent() -> defaultdict[int, list[int]]:
    below: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
        if entry.isdecimal() and (parent := _parent(int(entry), dead_too=True)) is not None:
            below[parent].append(int(entry))
    return below


def _parent(pid: int, *, dead_too: bool = False) -> int | None:
    """Return the parent of a process; None if the process is gone, or a zombie (unless `dead_too`)."""
    fields = stat_of(pid)
    return int(fields[1]) if fields and (dead_too or fields[0] not in (b"Z", b"X")) else None


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
