"""A copy of the state, and a thread that brings it to the disk while training goes on.

Memory is bounded: there is one copy, in buffers that are used again. While it is being written no other is taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.staging import copy_to_host


class HostCopies:
    """Host memory for a copy of arrays, made once and used again: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, numpy.ndarray] = {}

    def copy(self, tensors: Mapping[str, Array]) -> dict[str, numpy.ndarray]:
        """Copies of host or device arrays; overwrites those of the call before."""
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
    """One piece of work at a time, in a thread. All methods are for the thread that trains.

    Attributes:
        doing: what is, or was last, being done.
        failed: the last work raised an error; None before there was any.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """`report` is called with the text of an error, from the thread that writes."""
        self.doing = ""
        self.failed: Exception | None = None
        self._report = report
        self._thread: threading.Thread | None = None
        self._started = 0.0

    def start(self, doing: str, work: Callable[[], None]) -> None:
        """Begin `work`, which `doing` names; not while there is other work."""
        assert not self.is_busy

        def run() -> None:
            try:
                work()
                self.failed = None
            except Exception as error:  # training goes on, whatever it is
                self.failed = error
                self._report(str(error))

        self.doing, self._started = doing, time.monotonic()
        # Not a daemon: a process that comes to its end finishes what it has begun to write.
        self._thread = threading.Thread(target=run, name="mpitrain checkpoint")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """The work is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def seconds(self) -> float:
        """Since the work began."""
        return time.monotonic() - self._started
