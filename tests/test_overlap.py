"""The times of a step, by a clock that the test moves."""

from __future__ import annotations

from mpitrain.reducer.means import Overlap, Stopwatch, hidden_share


class Clock:
    """Seconds that pass when the test says so."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_step_with_a_gap_on_the_wire() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def at(seconds: float) -> Stopwatch:
        clock.seconds = 100.0 + seconds
        return watch

    for _ in range(2):  # a step leaves nothing to the next
        at(0).begin()
        at(1).busy()
        at(2).busy()  # a second bucket, while the first is under way
        at(4).idle()
        at(5).idle()  # looked again: nothing was under way
        at(7).busy()
        at(8).finish()
        at(10).idle()
        assert at(11).end() == Overlap(compute_seconds=8, exposed_seconds=3, wire_seconds=6)


def test_hidden() -> None:
    assert Overlap(8, 3, 6).hidden == 0.5
    assert Overlap(8, 0.0, 6).hidden == 1.0
    assert Overlap(1, 7, 6).hidden == 0.0  # waited for more than the wire
    assert Overlap(1, 0.5, 0.0).hidden == 1.0  # nothing was exchanged
    assert hidden_share(1.5, 6) == 0.75
