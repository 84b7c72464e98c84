"""SIGTERM to a rank of a job with keepers: its host is about to be shut down, so the rank asks for the host to leave.

    SIGTERM ─> the rank's record ─> guard ─> launcher: is the job healthy? ─┬─> the host leaves: wait for that
                                                                            └─> end, as without this module

mpiexec sends SIGTERM too, when it ends the other ranks after a failure. So the rank waits for what its keeper says, and
ends by the signal if that is no, or nothing.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import threading
import time
from contextlib import suppress

from mpitrain.job.context import JobContext
from mpitrain.launch.kept import DIES, STAYS, KeeperLine
from mpitrain.watching.activity import Activity

_LOOK_SECONDS = 0.05
# The record takes a second to the launcher, and the answer another one. Both may wait for a busy machine.
_ANSWER_SECONDS = 10.0


def heed(activity: Activity, context: JobContext) -> None:
    """From now on, take SIGTERM to this process as the wish that its host leaves. `context` is that of this rank.

    A program that handles SIGTERM itself, before or after this call, keeps its handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    process, is_told = os.getpid(), False

    def told(*_: object) -> None:
        nonlocal is_told
        if os.getpid() != process:  # a helper that was forked
            _end()
        elif not is_told:
            is_told = True
            activity.tell_end()
            _thread.start_new_thread(_wait, (context,))  # of threading, this thread may hold a lock

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is told:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, told)
    os.register_at_fork(after_in_child=forget)


def _wait(context: JobContext) -> None:
    """Wait until the job has left this host, or until it is clear that it will not."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    with suppress(OSError, ValueError, KeyError):
        line = KeeperLine(context.keeper, context.job)
        while True:
            wish = line.wish()
            if wish == DIES or (wish == STAYS and time.monotonic() > deadline):
                break
            if wish != STAYS:  # perhaps because of another change, which may be dropped; this one then follows
                deadline = time.monotonic() + _ANSWER_SECONDS
            time.sleep(_LOOK_SECONDS)
    _end()


def _end() -> None:
    """End by SIGTERM. Python sets no handler outside the main thread, which may compute."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
