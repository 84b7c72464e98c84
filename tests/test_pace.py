"""Naps between two looks at the wire, in a wait and in the thread that drives an exchange, and the times of a step.

Clocks are moved by hand, and sleeps are pretended.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jobs import until
from mpitrain.reducer import driver
from mpitrain.reducer.driver import Driver
from mpitrain.reducer.means import Overlap, Stopwatch, hidden_share
from mpitrain.waiting.control import patient_naps
from mpitrain.waiting.pieces import Pace

PIECE_BYTES = 256 * 1024
# So much that what is taken in at once, 256 KiB, can be left out of the arithmetic below.
BUFFERED_BYTES = 256 * 1024
NUM_BYTES = 100_000_000


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr("mpitrain.waiting.pieces.time.perf_counter", moved)
    return moved


def exchange(pace: Pace, clock: Clock, bytes_per_second: float, piece_bytes: int = PIECE_BYTES) -> float:
    """One that goes at this rate; returns the nap that it was made with."""
    pace.begin(NUM_BYTES + BUFFERED_BYTES, piece_bytes)
    nap = pace.nap()
    clock.now += NUM_BYTES / bytes_per_second
    assert pace.nap() == nap
    pace.end()
    return nap


def test_a_quarter_of_a_piece(clock: Clock) -> None:
    pace = Pace()
    assert pace.nap() == 0
    assert exchange(pace, clock, 500e6) == 0  # nothing is known of the wire
    # 256 KiB at 500 MB/s take 524 us.
    assert exchange(pace, clock, 500e6) == pytest.approx(131e-6, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.8, 8.0, 80.0], ids=["1 Gbit/s", "100 Mbit/s", "a late rank"])
def test_no_longer_than_200_us(clock: Clock, seconds: float) -> None:
    """1 Gbit/s: a quarter of a piece is 524 us. A rank that sends late looks like a slow wire."""
    pace = Pace()
    exchange(pace, clock, NUM_BYTES / seconds)
    assert exchange(pace, clock, NUM_BYTES / seconds) == 200e-6


def test_none_where_100_us_are_too_long(clock: Clock) -> None:
    """10 Gbit/s: a quarter of a piece is 52 us. With longer pieces there is time."""
    pace = Pace()
    exchange(pace, clock, 1250e6)
    assert exchange(pace, clock, 1250e6) == 0
    assert exchange(pace, clock, 1250e6, 2 * PIECE_BYTES) == pytest.approx(105e-6, rel=1e-2)


def test_the_best_rate_counts_and_fades(clock: Clock) -> None:
    pace = Pace()
    exchange(pace, clock, 500e6)
    # Slow ones, as while another job has the wire, do not make the naps longer at once.
    assert exchange(pace, clock, 1e6) == pytest.approx(131e-6, rel=1e-3)
    assert exchange(pace, clock, 1e6) == pytest.approx(131e-6 / 0.99, rel=1e-3)
    assert exchange(pace, clock, 600e6) == pytest.approx(131e-6 / 0.99**2, rel=1e-3)
    # A faster one does so at once: 437 us a piece.
    assert exchange(pace, clock, 600e6) == pytest.approx(109e-6, rel=1e-2)


def test_one_in_32_is_made_without(clock: Clock) -> None:
    pace = Pace()
    naps = [exchange(pace, clock, 250e6) for _ in range(96)]
    assert [number for number, nap in enumerate(naps, 1) if nap == 0] == [1, 32, 64, 96]


def test_short_exchanges_have_none_and_teach_nothing(clock: Clock) -> None:
    pace = Pace()
    exchange(pace, clock, 250e6)
    pace.begin(256 * 1024 - 1, 1024)
    assert pace.nap() == 0
    clock.now += 1e-9  # as it seems where all had come before
    pace.end()
    assert exchange(pace, clock, 250e6) == 200e-6


def test_a_wait_without_data_naps_once_it_lasts(clock: Clock) -> None:
    """None for 10 ms, then a 64th of the time so far, up to 500 us."""
    nap = patient_naps()
    naps = []
    for milliseconds in (0, 9, 7, 16, 100_000):
        clock.now += milliseconds * 1e-3
        naps.append(nap())
    assert naps == pytest.approx([0, 0, 250e-6, 500e-6, 500e-6])


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


def test_a_step_with_a_gap_on_the_wire() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def at(seconds: float) -> Stopwatch:
        clock.now = 1000.0 + seconds
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
