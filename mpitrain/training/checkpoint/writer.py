"""A copy of the state, and a thread that writes it to the disk while training goes on.

Memory is bounded: there is one copy, in buffers that are reused. No other copy is taken while it is being written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.staging import copy_to_host


class HostCopies:
    """Host memory for a copy of arrays, made once and reused: new pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, numpy.ndarray] = {}

    def copy(self, tensors: Mapping[str, Array]) -> dict[str, numpy.ndarray]:
        """Copy host or device arrays to the host. This overwrites the copies of the previous call."""
        buffers = {}
        for name, value in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = numpy.empty(value.shape, value.dtype)
            copy_to_host(value, buffer)
            buffers[name] = buffer
        self._buffers = buffers
        return buffers


class BackgroundWriter:
    """Do one piece of work at a time, in a thread. Call all methods from the thread that trains.

    Attributes:
        doing: a name of the current or last work.
        failed: whether the last work raised an error; None before any work.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """The thread that writes calls `report` with the text of an error."""
        self.doing = ""
        self.failed: Exception | None = None
        self._report = report
        self._thread: threading.Thread | None = None
        self._started = 0.0

    def start(self, doing: str, work: Callable[[], None]) -> None:
        """Begin `work`, which `doing` names. Do not call this while other work is under way."""
        assert not self.is_busy

        def run() -> None:
            try:
                work()
                self.failed = None
            except Exception as error:  # training goes on after any error
                self.failed = error
                self._report(str(error))

        self.doing, self._started = doing, time.monotonic()
        # The thread is not a daemon: a process that ends first finishes what it has begun to write.
        self._thread = threading.Thread(target=run, name="mpitrain checkpoint")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True if work is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self._started
