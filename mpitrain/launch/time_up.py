"""SIGUSR1 to `mpitrain run`: its time is nearly over, so the training is saved and ends.

    batch system ──SIGUSR1──> launcher ──"stop", as `mpitrain tell JOB stop`──> ranks: the present step is the last one
                                     <── saved ── exit code 138: the same command goes on from there

Batch systems send the signal some time before they end a job (Slurm: --signal=B:USR1@120). A signal that comes before
the training waits for its first step.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from mpitrain.launch.events import say
from mpitrain.launch.orders import Orders, teller_name

EXIT_CODE = 128 + signal.SIGUSR1
_AGAIN_SECONDS = 1.0
_early = threading.Event()


def note_early() -> None:
    """Keep a SIGUSR1 that comes before there is a TimeUp: it would kill this process, with the code of a saved job.

    Call this in the main thread.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda *_: _early.set())


class TimeUp:
    """Use this in `with`, in the main thread: inside, SIGUSR1 ends the training in order.

    A parent that ignores the signal has its way, as with `nohup`.
    """

    def __init__(self, orders: Orders) -> None:
        """`orders` are those of the job."""
        self._orders = orders
        self._told, self._stop = threading.Event(), threading.Event()
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="time up", daemon=True)

    def __enter__(self) -> TimeUp:
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN:
            signal.signal(signal.SIGUSR1, self._on_signal)
            self._thread.start()
            if _early.is_set():
                self._is_told = True
                self._told.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._told.set()
        if self._thread.ident is not None:
            # The signal may come once more before this process has ended, and would then kill it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def code(self, code: int) -> int:
        """Return the exit code of the job, from that without the signal."""
        return EXIT_CODE if code == 0 and self._is_told and self._orders.has_stopped else code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        self._told.set()  # the thread does the rest: a signal handler must not wait

    def _run(self) -> None:
        self._told.wait()
        if self._stop.is_set():
            return
        say("SIGUSR1: the time of the job is nearly over; the training ends after the present step and is saved")
        teller = teller_name(os.getuid(), "SIGUSR1")
        said = ""
        # A script may have several trainings, one after the other: each of them ends.
        while not self._stop.is_set():
            refused = self._orders.answer({"kind": "stop"}, teller).get("refused", "")
            if refused not in ("", said) and not self._orders.has_stopped:
                said = refused
                say(f"SIGUSR1: {said}")
            self._stop.wait(_AGAIN_SECONDS)
