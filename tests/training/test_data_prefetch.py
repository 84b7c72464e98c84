"""Ctrl-C while a batch is read ahead: nothing hangs, and no batch is lost."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from mpitrain.data.prefetch import Prefetch


class Interrupting:
    """Batches 0, 1, 2 and so on. While it reads batch `at`, the main thread is interrupted, once it is `awaited`."""

    steps_per_epoch, epoch = 1, 0

    def __init__(self, at: int) -> None:
        self.place, self._at = 0, at
        self.begun, self.awaited, self.left = threading.Event(), threading.Event(), threading.Event()

    def __next__(self) -> tuple[int, int]:
        if self.place == self._at and not self.left.is_set():
            self.begun.set()
            self.awaited.wait()
            time.sleep(0.1)  # for the main thread to begin its wait
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.left.wait()
        self.place += 1
        return self.place - 1, 1

    def share_out(self, samples_per_second: float) -> None:
        raise AssertionError

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def restore(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_an_interrupt_while_waiting_for_a_batch() -> None:
    source = Interrupting(at=0)
    data = Prefetch(source)
    with pytest.raises(KeyboardInterrupt):
        source.awaited.set()
        next(data)
    source.left.set()
    assert data.state() == {"place": 0}
    assert [next(data)[0] for _ in range(3)] == [0, 1, 2]
    data.close()


def test_an_interrupt_while_the_thread_ends() -> None:
    source = Interrupting(at=1)
    data = Prefetch(source, batches=1)
    assert next(data)[0] == 0
    source.begun.wait()
    with pytest.raises(KeyboardInterrupt):
        source.awaited.set()
        data.close()
    source.left.set()
    assert [next(data)[0] for _ in range(2)] == [1, 2]
    data.close()
    assert "mpitrain prefetch" not in [thread.name for thread in threading.enumerate()]
