"""The time that is left of a run does not jump, and follows a run that has become slower."""

from __future__ import annotations

from mpitrain.training.time_left import TimeLeft


def estimates(last: int, *seconds: float) -> list[float | None]:
    """The estimate after each of these steps, of a run that begins after step 10 at time 100."""
    now, left = 100.0, TimeLeft(10, 100.0)
    found = []
    for step, of_step in enumerate(seconds, 11):
        now += of_step
        left.add(step, now)
        found.append(left.seconds(step, last, now))
    return found


def test_the_first_step_counts_only_while_it_is_alone() -> None:
    assert estimates(14, 5.0, 1.0, 3.0, 2.0) == [15.0, 2.0, 2.0, 0.0]


def test_a_step_with_an_evaluation_does_not_let_it_jump() -> None:
    """Steps of 0.5 s, and every tenth one takes 5.5 s with what a hook does. A step then takes 1 s."""
    found = estimates(10 + 400, 0.5, *([0.5] * 9 + [5.5]) * 39, *[0.5] * 9)
    for step, seconds in enumerate(found[30:], 31):
        assert seconds is not None
        assert abs(seconds - (400 - step)) <= 5.0 * (400 - step) / 20, (
            step
        )  # one evaluation more or less, of 30 s or more


def test_a_run_that_becomes_slower() -> None:
    """64 steps of 1 s, then 192 of 2 s: a quarter of the run before the change is forgotten."""
    found = estimates(10 + 1000, *[1.0] * 64, *[2.0] * 192)
    assert found[63] == 936.0
    assert found[255] == 744 * 2.0


def test_neither_known_nor_negative() -> None:
    left = TimeLeft(3, 0.0)
    assert left.seconds(3, 9, 5.0) is None
    left.add(4, 1.0)
    assert (left.seconds(4, None, 1.0), left.seconds(4, 2, 1.0)) == (None, 0.0)


def test_a_pause_is_left_out() -> None:
    left = TimeLeft(0, 0.0)
    left.add(1, 1.0)
    left.leave_out(50.0)
    left.add(2, 52.0)
    left.leave_out(100.0)
    left.add(3, 153.0)
    assert left.seconds(3, 10, 153.0) == 7.0
