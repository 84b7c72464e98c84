"""A host's times by the clock here, although echoes are late and clocks drift apart."""

from __future__ import annotations

import random

import pytest

from mpitrain.launch.reports import HostClock


def test_without_an_echo_it_is_the_clock_here() -> None:
    assert HostClock().here(7.0) == 7.0


def test_the_fastest_echo_counts() -> None:
    clock = HostClock()
    clock.add(
        sent=10.0, there=110.9, heard=11.0
    )  # the message took 0.9 s on its way there, or the clocks differ by as much
    clock.add(sent=12.0, there=112.01, heard=12.02)
    clock.add(sent=14.0, there=114.3, heard=14.4)
    assert clock.here(120.0) == pytest.approx(20.0)


def test_clocks_that_drift_apart_for_a_day() -> None:
    """The fastest echo of all is the first one, when the clocks were 10 s apart; then they drift by 10 us a second."""
    clock, chance = HostClock(), random.Random(15)

    def there(here: float) -> float:
        return here * (1 + 1e-5) + 10.0

    clock.add(sent=0.0, there=there(0.0005), heard=0.001)
    for now in range(1, 24 * 3600):
        way, back = chance.uniform(0.001, 0.02), chance.uniform(0.001, 0.02)
        clock.add(sent=now, there=there(now + way), heard=now + way + back)
    assert clock.here(there(24 * 3600.0)) == pytest.approx(24 * 3600.0, abs=0.01)
