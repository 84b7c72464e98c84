import math

import pytest

from mpitrain.errors import ConfigError
from mpitrain.optim.schedules import constant, warmup_cosine


def test_constant():
    rate = constant(0.25)
    assert [rate(step) for step in (0, 1, 10**9)] == [0.25] * 3


def test_warmup_rises_in_equal_steps_to_the_peak():
    rate = warmup_cosine(0.8, warmup_steps=3, total_steps=10)
    assert [rate(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8], rel=1e-15)
    assert rate(3) == 0.8


def test_cosine_falls_to_exactly_the_final_rate():
    rate = warmup_cosine(1.0, warmup_steps=10, total_steps=110, final=0.2)
    assert rate(60) == pytest.approx(0.6, rel=1e-15)  # half-way in steps is half-way in rate
    assert rate(35) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)), rel=1e-15)
    assert rate(110) == rate(111) == rate(10**9) == 0.2
    falling = [rate(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_without_warmup_the_first_step_has_the_peak():
    assert warmup_cosine(0.5, warmup_steps=0, total_steps=1)(0) == 0.5


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
def test_constant_refuses(rate):
    with pytest.raises(ConfigError, match=rf"rate is {rate}; allowed: a finite number >= 0"):
        constant(rate)


@pytest.mark.parametrize(
    ("peak", "warmup_steps", "total_steps", "final"),
    [(-1.0, 0, 10, 0.0), (math.nan, 0, 10, 0.0), (math.inf, 0, 10, 0.0), (0.1, 0, 10, 0.2),
     (0.1, 0, 10, -0.1), (0.1, -1, 10, 0.0), (0.1, 10, 10, 0.0), (0.1, 0, 0, 0.0)],
)  # fmt: skip
def test_warmup_cosine_refuses(peak, warmup_steps, total_steps, final):
    with pytest.raises(ConfigError, match="allowed: 0 <= "):
        warmup_cosine(peak, warmup_steps=warmup_steps, total_steps=total_steps, final=final)
