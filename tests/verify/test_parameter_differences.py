"""Parameters in which two runs differ."""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy
import pytest
from made_up_runs import BIAS, WEIGHT, changed, line, only, parameters, records

from mpitrain.verify.compare import compare
from mpitrain.verify.comparison import report
from mpitrain.verify.fingerprint import sketch
from mpitrain.verify.record_file import RunRecord


@pytest.mark.parametrize("factor", [1 + 0.9 * 2.0**-6, 1 + 1.1 * 2.0**-6])
def test_what_a_step_changes_is_compared_to_a_quarter_of_the_digits(factor: float) -> None:
    """The tolerance is relative to the change, which is a hundredth of the parameter."""
    its = compare(*records(1, parameters=changed("b", 1, factor)))
    assert its.largest["parameters"][0] == pytest.approx(1 - 1 / factor, rel=0.05)
    assert [(one.step, one.kind) for one in its.differences[:1]] == ([] if factor < 1.015 else [(1, "parameters")])


def test_the_parameter_that_is_changed_otherwise_is_named() -> None:
    """The change is in the last step, after which no gradient shows it."""
    step, kind, text = only(compare(*records(3, parameters=changed("w", 3, 1.5))))
    assert (step, kind) == (3, "parameters")
    found = re.fullmatch(
        r"w: changed by (\S+) on 1 rank, by (\S+) on several, (\S+) apart: the relative difference is 0\.33, allowed "
        r"is 0\.016",
        text,
    )
    assert found, text
    alone, several, apart = map(float, found.groups())
    assert (several / alone, apart / alone) == (pytest.approx(1.5, rel=1e-3), pytest.approx(0.5, rel=1e-2))
    size = 0.03 * float(numpy.linalg.norm(WEIGHT))
    assert size / 3 < alone < 3 * size  # from projections


@pytest.mark.parametrize(("factor", "word"), [(2.0, "multiplied"), (0.5, "divided")])
def test_a_change_times_the_number_of_ranks(factor: float, word: str) -> None:
    text = only(compare(*records(3, parameters=changed("w", 3, factor))))[2]
    assert text.endswith(f"; {word} by 2, the number of ranks: is world.size in the update?")


def test_parameters_that_begin_otherwise() -> None:
    """The report names this difference before all that follow from it."""
    other = parameters(0) | {"b": sketch("b", 2 * BIAS)}
    both = records(1, before=other, loss=7.0, parameters=other)
    its = compare(*both)
    norm = numpy.linalg.norm(BIAS.astype(float))
    assert [(one.step, one.kind) for one in its.differences] == [(0, "parameters"), (1, "loss")]
    assert its.differences[0].text == (
        f"b began with norm {norm:.6g} on 1 rank, {2 * norm:.6g} on several: the relative difference is 0.5, allowed "
        "is 0.00024"
    )
    found = list(report(*both, its))
    assert "  parameters     differ before the first step" in found
    assert f"first difference: before the first step, parameters: {its.differences[0].text}" in found


@pytest.mark.parametrize("both", [False, True])
def test_a_change_between_two_steps(both: bool) -> None:
    """The report names the change itself, and not the gradient that follows from it."""
    other = {"b": sketch("b", BIAS * numpy.float32(0.9))}
    alone, together = records(2, before=other, loss=7.0)
    if both:
        alone = RunRecord(1, (alone.lines[0], dataclasses.replace(alone.lines[1], before=other), alone.lines[2]))
    found = compare(alone, together).differences
    assert [(one.step, one.kind) for one in found] == ([] if both else [(1, "parameters")]) + [(2, "loss")]
    if not both:
        assert found[0].text.startswith("b: changed before step 2 began by 0 on 1 rank, by ")


def test_changes_below_the_rounding_of_a_parameter() -> None:
    """In bfloat16 a small change may be rounded to none, or to twice its size."""
    other = BIAS * (1 + 2.0**-8)
    runs = []
    for number, after in enumerate((BIAS, other), 1):
        values = [sketch("b", its.astype(ml_dtypes.bfloat16)) for its in (BIAS, after)]
        same = {"b": sketch("b", BIAS)}
        lines = (line(1, [["a"]], weights=[], tensors=same, before={"b": values[0]}, parameters={"b": values[1]}),)
        runs.append(RunRecord(number, lines))
    assert runs[0].lines[0].parameters != runs[1].lines[0].parameters
    assert compare(*runs).differences == []
