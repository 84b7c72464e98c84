"""`mpitrain run --detach`: the launcher continues without the terminal from which it was started.

command ─fork─> launcher, in a session of its own ── hosts, mpiexec ── all ranks are there ── continues alone
    └── waits in the terminal, where all is printed until then ──────────────┴─> says the id, and ends
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

_LOOK_SECONDS = 0.1
_ID_BYTES = 64
_READ_BYTES = 1 << 16


def detach(work: Callable[[Callable[[str], None]], int], follow: Callable[[str], str]) -> int:
    """Let another process work. Return when it has started, or its exit code if it ends before. Twice: also there.

    Call this in the main thread of a process that has no other.

    Args:
        work: returns the exit code. It calls its argument with the id of the job when all ranks are there.
        follow: returns what to print then, from the id.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else both processes would print it
    # Agents and keepers inherit what the launcher prints to, and hold it open: an ssh would wait for their end.
    files = {number: os.memfd_create(f"mpitrain-detached-{number}") for number in (1, 2)}
    child = os.fork()
    if child:
        os.close(writing)
        return _wait(child, reading, files, follow)
    os.close(reading)
    os.setsid()  # no Ctrl-C and no hangup of the terminal comes here
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _redirect({0: os.open(os.devnull, os.O_RDWR), **files})

    def leave(job: str) -> None:
        with suppress(BrokenPipeError):  # the command was killed meanwhile
            os.write(writing, job.encode())
        os.close(writing)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        nothing = os.open(os.devnull, os.O_RDWR)
        _redirect({1: nothing, 2: nothing})

    return work(leave)


def _wait(child: int, reading: int, files: Mapping[int, int], follow: Callable[[str], str]) -> int:
    """Print what the launcher prints until it has started, or has ended. Ctrl-C and SIGTERM are passed on to it."""

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    printed = dict.fromkeys(files, 0)
    while not select.select([reading], [], [], _LOOK_SECONDS)[0]:
        _print_new(files, printed)
    job = os.read(reading, _ID_BYTES).decode()
    if not job:
        _, status = os.waitpid(child, 0)
    _print_new(files, printed)
    if not job:
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code
    print(f"job {job} continues without this terminal: process {child} on {socket.gethostname()}\n{follow(job)}")
    return 0


def _print_new(files: Mapping[int, int], printed: dict[int, int]) -> None:
    for number, file in files.items():
        while text := os.pread(file, _READ_BYTES, printed[number]):
            printed[number] += os.write(number, text)


def _redirect(places: Mapping[int, int]) -> None:
    for number, file in places.items():
        os.dup2(file, number)
    for file in {*places.values()}:
        os.close(file)
