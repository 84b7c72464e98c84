"""The scale alone: when it falls, when it grows, what it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim import LossScale


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


@pytest.mark.parametrize("initial", [0, 0.5, 3, -2, 2.0**33, float("inf"), float("nan"), "8", True], ids=repr)
def test_a_scale_that_is_no_power_of_two(initial: Any) -> None:
    if initial is True:  # 1, and nothing wrong with it
        assert LossScale(initial).value == 1
        return
    with pytest.raises(ConfigError, match=r"it must be a power of two from 1 to 2\*\*32"):
        LossScale(initial)


@pytest.mark.parametrize("interval", [0, -1, 2.5, "9"], ids=repr)
def test_an_interval_that_is_none(interval: Any) -> None:
    with pytest.raises(ConfigError, match=r"growth_interval=.*; it must be an int of at least 1"):
        LossScale(growth_interval=interval)


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
