"""Naps between two looks at the wire, with a clock that is moved by hand."""

from __future__ import annotations

import pytest

from mpitrain.waiting.control import patient_naps
from mpitrain.waiting.pieces import Pace

PIECE_BYTES = 256 * 1024
# So much that what is taken in at once, 256 KiB, can be left out of the arithmetic below.
BUFFERED_BYTES = 256 * 1024
NUM_BYTES = 100_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

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
