"""StepParts by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpitrain.reducer.means import Overlap
from mpitrain.strategies.chooser import StepParts


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.now / 4)
        monkeypatch.setattr("mpitrain.strategies.chooser.time", clock)

    def step(self, parts: StepParts, computed: float, exposed: float) -> None:
        """Gradient 1 is in after half of the computation, gradient 0 at its end."""
        parts.begin()
        for index in (1, 0):
            self.now += computed / 2
            parts.ready(index)
        self.now += exposed
        parts.end(Overlap(computed, exposed, exposed))


def test_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, clock = StepParts(2), Clock(monkeypatch)
    parts.clear(2)
    assert parts.medians(with_ready=True) is None
    for computed, exposed in [(64, 64), (32, 32), (4, 1), (4, 3), (8, 0)]:  # the first two are left out
        clock.step(parts, computed, exposed)
    found = parts.medians(with_ready=True)
    assert found is not None
    assert (found.seconds, found.own_seconds, found.ready, found.busy_cores) == (7, 4, (4, 2), 0.25)
    assert found.error == pytest.approx(1.25 / 1.35 * 1.5 / 3**0.5)  # the quarters of 5, 7 and 8 are 6 and 7.5
    without = parts.medians(with_ready=False)
    assert without is not None
    assert without.ready == ()
    parts.clear(0)
    clock.step(parts, 2, 0)
    alone = parts.medians(with_ready=True)
    assert alone is not None
    assert (alone.seconds, alone.error) == (2, 0)
