"""A thread that moves an exchange on while the rank's main thread computes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from mpitrain.control import Control
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
        weakref.finalize(progress.__self__, self._running.set)  # type: ignore[attr-defined]
        threading.Thread(target=self._run, name="mpitrain exchange", daemon=True).start()

    def start(self) -> None:
        """Begin to call `progress`."""
        self._running.set()

    def stop(self) -> None:
        """End that: the thread touches nothing when this returns. Raises what `progress` raised in it."""
        self._running.clear()
        with self._at_work:
            self._control.raise_posted()

    def _run(self) -> None:
        while True:
            self._running.wait()
            progress = self._progress()
            if progress is None:
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


def threads_by_default(world: World) -> bool:
    """Whether an exchange is driven by a thread where nobody says: between nodes, if MPI lets it."""
    return world.num_nodes > 1 and allows_threads()


def allows_threads() -> bool:
    """Whether MPI may be called from several threads at a time."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
