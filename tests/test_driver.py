"""The thread that drives an exchange: how long it sleeps between two looks, with a pretended sleep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jobs import until
from mpitrain.reducer import driver
from mpitrain.reducer.driver import Driver


class Wire:
    """Has these naps for the thread, one a look."""

    def __init__(self, naps: list[float | None]) -> None:
        self.naps = naps
        self.num_looks = 0

    def progress(self) -> float | None:
        self.num_looks += 1
        return self.naps[self.num_looks - 1]


def test_it_sleeps_as_long_as_a_wait_would_but_never_less_than_100_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last look, the thread looks no more until it is started again."""
    slept: list[float] = []
    monkeypatch.setattr(driver, "time", SimpleNamespace(sleep=slept.append))
    control: Any = SimpleNamespace(raise_posted=lambda: None)
    wire = Wire([0.0, 50e-6, 200e-6, None, 100e-6, 1e-3, None])
    thread = Driver(wire.progress, control)
    thread.start()
    until(lambda: len(slept) == 4)
    thread.stop()
    assert (slept, wire.num_looks) == ([100e-6, 100e-6, 200e-6, 100e-6], 4)
    thread.start()
    until(lambda: len(slept) == 7)
    thread.stop()
    assert (slept[4:], wire.num_looks) == ([100e-6, 1e-3, 100e-6], 7)
    thread.close()
