"""A fault that is undone after some seconds, whatever becomes of the process that ordered it.

    process ──fork──> keeper of the outage: makes the fault, waits, undoes it
       └──── pipe ──────┘ the kernel closes it when the process ends: the keeper then undoes the fault at once

So the fault ends even if chaos, an ssh connection or the process here is killed. If the keeper is killed, the process
undoes the fault. Sent to hosts as text: this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable


class Outage:
    """A fault in force. Make at most one in a process: a second keeper would hold the pipe of the first one open."""

    def __init__(self, number: int, make: Callable[[], None], undo: Callable[[], None], seconds: float) -> None:
        """Make the fault in a process of its own; `undo` may be called there and here, and more than once."""
        self.number, self._undo = number, undo
        reader, self._writer = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            os.close(self._writer)
            _keep(reader, make, undo, seconds)
        os.close(reader)

    def is_over(self) -> bool:
        """Return whether the fault has been undone."""
        pid, status = os.waitpid(self._keeper, os.WNOHANG)
        if pid:
            self._see_to(status)
        return pid != 0

    def end(self) -> None:
        """Undo the fault now."""
        os.write(self._writer, b"\n")
        self._see_to(os.waitpid(self._keeper, 0)[1])

    def _see_to(self, status: int) -> None:
        os.close(self._writer)
        if os.WIFSIGNALED(status):
            self._undo()


def _keep(reader: int, make: Callable[[], None], undo: Callable[[], None], seconds: float) -> None:
    """Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # else an ssh connection would wait for the keeper
            os.dup2(nowhere, descriptor)
        make()
        select.select([reader], [], [], seconds)
    finally:
        try:
            undo()
        finally:
            os._exit(0)
