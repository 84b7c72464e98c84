"""A thread that moves an exchange on while the rank's main thread computes.

No MPI library moves a large message while nobody calls into it. Between nodes this thread does so; measured at 1
Gbit/s, it hides several times as much of the exchange behind the backward pass as calls between the layers do. Within
one node the ranks share the cores that they compute with, a thread only takes some of them away, and the calls are made
inside a reducer's `ready` and `finish`. docs/log.md has the numbers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from mpitrain.errors import ConfigError, everywhere
from mpitrain.waiting.control import Control
from mpitrain.world import World

# Long enough to leave the cores to the computation, short against the time that a piece takes on Ethernet.
_NAP_SECONDS = 100e-6


class Driver:
    """Calls `progress`, a bound method, again and again between `start` and `stop`, until it returns true.

    In between nobody else may call it. The thread ends with the object whose method it is.
    """

    def __init__(self, progress: Callable[[], bool], control: Control) -> None:
        """What `progress` raises is posted to `control`: the main thread may be waiting for something else."""
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
        """End that: the thread touches nothing when this returns. Raises what `progress` raised in it."""
        self._running.clear()
        with self._at_work:
            self._control.raise_posted()

    def close(self) -> None:
        """End the thread, which has been stopped."""
        self._is_closed = True
        self._running.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._running.wait()
            progress = self._progress()
            if progress is None or self._is_closed:
                return
            with self._at_work:
                if self._running.is_set():
                    self._call(progress)
            del progress  # or the object would never end
            time.sleep(_NAP_SECONDS)

    def _call(self, progress: Callable[[], bool]) -> None:
        try:
            if progress():
                self._running.clear()
        except BaseException as error:
            self._control.posted = error
            self._running.clear()


def make_driver(world: World, progress: Callable[[], bool], threaded: bool | None) -> Driver | None:
    """A Driver for `progress`; None where no thread is wanted, or nobody says so and threads_by_default is against it.

    Raises:
        ConfigError: a thread is wanted, and MPI does not let it. On every rank.
    """
    if threaded is None:
        threaded = threads_by_default(world)
    elif threaded and not allows_threads():
        raise everywhere(
            ConfigError("threaded=True needs MPI_THREAD_MULTIPLE, and MPI was started without; leave it out")
        )
    return Driver(progress, world.control) if threaded else None


def threads_by_default(world: World) -> bool:
    """Whether an exchange is driven by a thread where nobody says: between nodes, if MPI lets it."""
    return world.num_nodes > 1 and allows_threads()


def allows_threads() -> bool:
    """Whether MPI may be called from several threads at a time."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
