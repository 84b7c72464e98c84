"""Ctrl-C while a batch is read ahead: nothing hangs, and no batch is lost."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from mpitrain.training.data.prefetch import Prefetch


class Slow:
    """Batches 0, 1, 2 and so on, each of which takes 0.2 s."""

    steps_per_epoch, epoch = 1, 0

    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> tuple[int, int]:
        time.sleep(0.2)
        self.place += 1
        return self.place - 1, 1

    def share_out(self, samples_per_second: float) -> None:
        raise AssertionError

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def restore(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def interrupt_soon() -> None:
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()


def test_an_interrupt_while_waiting_for_a_batch() -> None:
    data = Prefetch(Slow())
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        next(data)
    assert data.state() == {"place": 0}
    assert [next(data)[0] for _ in range(3)] == [0, 1, 2]
    data.close()


def test_an_interrupt_while_the_thread_ends() -> None:
    data = Prefetch(Slow(), batches=1)
    assert next(data)[0] == 0
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        data.close()
    assert [next(data)[0] for _ in range(2)] == [1, 2]
    data.close()
    assert "mpitrain prefetch" not in [thread.name for thread in threading.enumerate()]
