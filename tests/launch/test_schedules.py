"""What the policy must do in any schedule of faults and requests: no lost state, never two attempts at once, always an
end, always a culprit, and a host that was set aside comes back only by its rule."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import Schedule

NUM_NIGHTLY = 1_000_000


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=10, max_size=120))
def test_any_schedule(choices: bytes) -> None:
    play(choices)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_million_schedules() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    for number in range(NUM_NIGHTLY):
        try:
            play(chance.randbytes(chance.randrange(10, 200)))
        except AssertionError as error:
            raise AssertionError(f"schedule {number} of seed {seed}: {error}") from error


def play(choices: bytes) -> None:
    schedule = Schedule(choices)
    try:
        schedule.play()
    except AssertionError:
        print(*schedule.story, sep="\n")
        raise
