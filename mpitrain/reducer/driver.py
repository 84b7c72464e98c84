"""A thread that drives an exchange while the rank's main thread computes.

No MPI library moves a large message between calls of the library. Between nodes, this thread makes these calls. In
measurements at 1 Gbit/s, it overlapped several times as much of the exchange with the backward pass as calls between
the layers did. Within one node, the ranks share the cores that they compute with, so a thread would only take some of
these away. There, a reducer's `ready` and `finish` make the calls. benchmarks/log/ has the numbers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from mpitrain.errors import ConfigError, everywhere
from mpitrain.waiting.control import Control
from mpitrain.world.world import World

# Long enough to leave the cores to the computation; short compared with the time that a piece takes on Ethernet.
_NAP_SECONDS = 100e-6


class Driver:
    """Calls `progress`, a bound method, again and again between `start` and `stop`, until `progress` returns None.

    Before that, `progress` returns the seconds that the thread may sleep. In that time no other thread may call
    `progress`. The thread ends when the object of the method `progress` is deleted.
    """

    def __init__(self, progress: Callable[[], float | None], control: Control) -> None:
        """Exceptions in `progress` are posted to `control`: the main thread may be waiting for something else."""
        self._running = threading.Event()
        self._at_work = threading.Lock()
        self._control = control
        self._progress = weakref.WeakMethod(progress)
        self._is_closed = False
        weakref.finalize(progress.__self__, self._running.set)  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._run, name="mpitrain exchange", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Begin to call `progress`."""
        self._running.set()

    def stop(self) -> None:
        """Stop the calls: after this returns, the thread does nothing. Raises what `progress` raised in the thread."""
        self._running.clear()
        with self._at_work:
            self._control.raise_posted()

    def close(self) -> None:
        """End the thread, after `stop`."""
        self._is_closed = True
        self._running.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._running.wait()
            progress = self._progress()
            if progress is None or self._is_closed:
                return
            nap = None
            with self._at_work:
                if self._running.is_set():
                    nap = self._call(progress)
            del progress  # otherwise the object would never end
            time.sleep(max(_NAP_SECONDS, nap or 0.0))

    def _call(self, progress: Callable[[], float | None]) -> float | None:
        nap = None
        try:
            nap = progress()
        except BaseException as error:
            self._control.posted = error
        if nap is None:
            self._running.clear()
        return nap


def make_driver(world: World, progress: Callable[[], float | None], threaded: bool | None) -> Driver | None:
    """Return a Driver for `progress`; None if `threaded` is False, or if it is None and threads_by_default is False.

    Raises:
        ConfigError: a thread is requested, but MPI does not allow threads; raised on every rank.
    """
    if threaded is None:
        threaded = threads_by_default(world)
    elif threaded and not allows_threads():
        raise everywhere(
            ConfigError("threaded=True needs MPI_THREAD_MULTIPLE, but MPI has a lower level; leave out threaded=True")
        )
    return Driver(progress, world.control) if threaded else None


def threads_by_default(world: World) -> bool:
    """True if a thread drives an exchange by default: between nodes, if MPI allows threads."""
    return world.num_nodes > 1 and allows_threads()


def allows_threads() -> bool:
    """True if several threads may call MPI at the same time."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
