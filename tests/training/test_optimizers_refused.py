"""What optimizers refuse, and their schedules and loss scales."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy
import pytest

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim import LossScale
from mpitrain.optim.flat_optimizer import clip_by_global_norm
from mpitrain.optim.optimizers import SGD, Adam, AdamW
from mpitrain.optim.schedules import constant, warmup_cosine

NO_STEPS = {"warmup_steps": 0, "total_steps": 10}
CHANGES = ({"final": 0.2}, {"final": -0.1}, {"warmup_steps": -1}, {"warmup_steps": 10}, {"total_steps": 0})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(-0.1), "learning_rate is -0.1; allowed: a finite number >= 0"),
        (lambda: SGD(math.nan), "learning_rate is nan"),
        (lambda: SGD(0.1, momentum=1.0), "momentum is 1.0; allowed: 0 <= momentum < 1"),
        (lambda: SGD(0.1, nesterov=True), "nesterov is True and momentum is 0"),
        (lambda: SGD(0.1, weight_decay=-1), "weight_decay is -1; allowed"),
        (lambda: SGD(0.1, clip_norm=0), "clip_norm is 0; allowed: None or a finite number > 0"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), r"betas are \(0.9, 1.0\); allowed"),
        (lambda: Adam(0.1, betas=(0.9,)), r"betas are \(0.9,\); allowed"),
        (lambda: Adam(0.1, epsilon=0), "epsilon is 0; allowed: a finite number > 0"),
        (lambda: AdamW(0.1, weight_decay=math.inf), "weight_decay is inf; allowed"),
        *(
            (lambda norm=norm: clip_by_global_norm(numpy.ones(3), norm), "max_norm is .*; allowed: a finite number > 0")
            for norm in (0.0, -1.0, math.inf, math.nan)
        ),
        *(
            (
                lambda dtype=dtype: SGD(0.1).start(numpy.ones(3, dtype), []),
                rf"parameters are {dtype}; allowed: float32 or",
            )
            for dtype in map(numpy.dtype, (numpy.float16, ml_dtypes.bfloat16, numpy.int64))
        ),
        (lambda: SGD(0.1).start(numpy.ones((2, 3)), []), "allowed: one dimension, contiguous"),
        (lambda: SGD(0.1).start(numpy.ones(6)[::2], []), "allowed: one dimension, contiguous"),
        *(
            (lambda decayed=decayed: SGD(0.1).start(numpy.ones(6), [slice(*one) for one in decayed]), "decayed range")
            for decayed in ([(0, 7)], [(-1, 3)], [(0, 6, 2)], [(4, 2)], [(0, 3), (2, 4)])
        ),
        *(
            (lambda rate=rate: constant(rate), f"rate is {rate}; allowed: a finite number >= 0")
            for rate in (-0.1, math.nan, math.inf)
        ),
        *((lambda peak=peak: warmup_cosine(peak, **NO_STEPS), "allowed: 0 <= ") for peak in (-1.0, math.nan, math.inf)),
        *((lambda change=change: warmup_cosine(0.1, **NO_STEPS | change), "allowed: 0 <= ") for change in CHANGES),
        *(
            (lambda initial=initial: LossScale(initial), r"it must be a power of two from 1 to 2\*\*32")
            for initial in (0, 0.5, 3, -2, 2.0**33, math.inf, math.nan, "8")
        ),
        *(
            (
                lambda steps=steps: LossScale(growth_interval=steps),
                "growth_interval=.*; it must be an int of at least 1",
            )
            for steps in (0, -1, 2.5, "9")
        ),
    ],
)
def test_what_is_not_allowed(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_update_refuses_gradients_that_do_not_fit_and_bad_rates():
    optimizer = SGD(lambda step: 0.1 - step)
    with pytest.raises(ConfigError, match="SGD has no parameters yet"):
        optimizer.update(numpy.ones(3))
    optimizer.start(numpy.ones(3), [])
    for gradients in (numpy.ones(4), numpy.ones(3, "f4")):
        with pytest.raises(ConfigError, match=r"gradients are .*; allowed, as the parameters: float64\(3,\)"):
            optimizer.update(gradients)
    optimizer.update(numpy.ones(3))
    with pytest.raises(ConfigError, match=r"learning_rate at step 1 is -0.9; allowed"):
        optimizer.update(numpy.ones(3))


def after(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step: `.` good, `s` skipped."""
    values = []
    for step in steps:
        scale.update(skipped=step == "s")
        values.append(scale.value)
    return values


def test_it_is_halved_by_a_skipped_step_and_doubled_after_so_many_good_ones() -> None:
    scale = LossScale(8.0, growth_interval=3)
    assert scale.value == 8
    assert after(scale, "..s...s..") == [8, 8, 4, 4, 4, 8, 4, 4, 4]  # a skipped step starts the count anew
    assert scale.skipped_steps == 2
    assert after(scale, ".") == [8]
    assert after(LossScale(growth_interval=1), ".") == [131072]


def test_it_ends_at_2_to_the_32() -> None:
    scale = LossScale(2.0**31, growth_interval=1)
    assert after(scale, "...") == [2.0**32] * 3


def test_at_1_nothing_may_be_skipped() -> None:
    scale = LossScale(4)
    assert scale.may_skip
    assert after(scale, "ss") == [2, 1]
    assert not scale.may_skip


def test_a_restored_one_goes_on_alike() -> None:
    steps = "..s....s."
    whole = after(LossScale(64, growth_interval=3), steps)
    for cut in range(len(steps)):
        first = LossScale(64, growth_interval=3)
        before = after(first, steps[:cut])
        second = LossScale(growth_interval=3)
        second.restore(first.state())
        assert before + after(second, steps[cut:]) == whole
        assert second.skipped_steps == 2


def test_a_shorter_interval_after_a_resume_doubles_at_the_next_good_step() -> None:
    first, second = LossScale(64), LossScale(growth_interval=2)
    after(first, "......")
    second.restore(first.state())
    assert after(second, "...") == [128, 128, 256]


@pytest.mark.parametrize(
    "wrong",
    [{"value": 3.0}, {"value": None}, {"value": "8"}, {"good_steps": -1}, {"good_steps": 1.5}, {"skipped_steps": None}],
    ids=repr,
)
def test_a_state_that_is_none(wrong: dict[str, Any]) -> None:
    scale = LossScale(4)
    with pytest.raises(CheckpointError, match="was it written by mpitrain"):
        scale.restore({"value": 8.0, "good_steps": 1, "skipped_steps": 2} | wrong)
    assert scale.state() == {"value": 4.0, "good_steps": 0, "skipped_steps": 0}


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
