"""`mpitrain run --detach`: the launcher continues without the terminal from which it was started.

command ─fork─> launcher, in a session of its own ── hosts, mpiexec ── all ranks are there ── continues alone
    └── waits in the terminal, where all is printed until then ──────────────┴─> says the id, and ends
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


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
    child = os.fork()
    if child:
        os.close(writing)
        return _wait(child, reading, follow)
    os.close(reading)
    os.setsid()  # no Ctrl-C and no hangup of the terminal comes here
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _redirect((0,))

    def leave(job: str) -> None:
        with suppress(BrokenPipeError):  # the command was killed meanwhile
            os.write(writing, job.encode())
        os.close(writing)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        _redirect((1, 2))

    return work(leave)


def _wait(child: int, reading: int, follow: Callable[[str], str]) -> int:
    """Wait for the id of the job, or for the end of the process. Ctrl-C and SIGTERM are passed on to it."""

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    with os.fdopen(reading) as pipe:
        job = pipe.read()
    if not job:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code
    print(f"job {job} continues without this terminal: process {child} on {socket.gethostname()}\n{follow(job)}")
    return 0


def _redirect(descriptors: tuple[int, ...]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)
