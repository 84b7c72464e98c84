"""The first difference between two records, and its report."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import pytest
from made_up_runs import BIAS, WEIGHT, line, only, parameters, records

from mpitrain.verify.compare import compare
from mpitrain.verify.comparison import report
from mpitrain.verify.fingerprint import sketch
from mpitrain.verify.record_file import MEAN, SUM, RunRecord


def test_equal_runs() -> None:
    its = compare(*records())
    assert its.differences == []
    assert (its.num_steps, its.dtype, its.tolerance) == (3, "float32", 2.0**-12)
    assert its.counts == {
        "samples": 12,
        "weights": 3,
        "loss": 3,
        "gradients": 6,
        "learning rate": 3,
        "parameters": 8,  # the step and the first values of the parameters
        "metrics": 1,
    }
    kinds = ("loss", "gradients", "parameters", "metrics")
    assert {kind: value[0] for kind, value in its.largest.items()} == dict.fromkeys(kinds, 0.0)


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        ("float64", "float64", 2.0**-26.5),
        ("float32", "float32", 2.0**-12),
        ("float32", "float16", 2.0**-5.5),
        ("float32", "bfloat16", 2.0**-4),
        ("float64", "float32", 2.0**-12),
    ],
)
def test_the_tolerance_is_half_of_the_digits_of_the_narrowest_dtype(
    dtype: str, precision: str, expected: float
) -> None:
    tensors = {"w": sketch("w", WEIGHT.astype(dtype))}
    both = [RunRecord(n, (line(1, [["a"]], tensors=tensors, precision=precision),)) for n in (1, 2)]
    its = compare(*both)
    assert its.tolerance == pytest.approx(expected, rel=1e-12)
    assert compare(*both, tolerance=0.5).tolerance == 0.5


@pytest.mark.parametrize("kind", ["loss", "metrics"])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_values_are_compared_with_the_tolerance(kind: str, factor: float) -> None:
    """The loss of step 2 is 0.5, and the largest loss so far is 1: a difference is relative to the largest."""
    apart = factor * 2.0**-12
    at, value = (2, 0.5 + apart) if kind == "loss" else (3, {"accuracy": 0.5 - 0.5 * apart})
    its = compare(*records(at, **{kind: value}))
    assert its.largest[kind][0] == pytest.approx(apart, rel=1e-6)
    if factor < 1:
        assert its.differences == []
        return
    step, found, text = only(its)
    assert (step, found) == (at, kind)
    assert "on 1 rank, " in text
    assert text.endswith("the relative difference is 0.00027, allowed is 0.00024")


def test_a_loss_that_is_no_number_differs() -> None:
    assert only(compare(*records(2, loss=math.nan)))[:2] == (2, "loss")


def test_the_gradient_that_differs_is_named_with_its_norms() -> None:
    other = WEIGHT * 2
    other[3, 4] += 5.0
    tensors = {"w": sketch("w", other), "b": sketch("b", BIAS)}
    step, kind, text = only(compare(*records(2, tensors=tensors)))
    assert (step, kind) == (2, "gradients")
    norms = [f"{numpy.linalg.norm(array.astype(float)):.6g}" for array in (WEIGHT * 2, other)]
    assert text.startswith(f"w: norm {norms[0]} on 1 rank, {norms[1]} on several, 5 apart: the relative difference is ")


def test_all_gradients_that_differ_are_counted() -> None:
    """Changes that follow from these gradients are not compared, because they cannot be equal."""
    tensors = {"w": sketch("w", WEIGHT), "b": sketch("b", -BIAS)}
    text = only(compare(*records(3, tensors=tensors, parameters=parameters(0))))[2]
    assert text.startswith("w: ")
    assert text.endswith("; 2 of 2 differ")


def test_a_gradient_of_rounding_alone_is_no_difference() -> None:
    """The gradient is a thousandth of a millionth of the others, and has another sign."""
    small = BIAS * numpy.float32(1e-9)
    one, several = (
        line(1, [["a"]], tensors={"w": sketch("w", WEIGHT), "b": sketch("b", its)}) for its in (small, -small)
    )
    assert compare(RunRecord(1, (one,)), RunRecord(2, (several,))).differences == []


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, -1.0)], ids=["the same", "of rounding alone"])
def test_what_follows_from_rounding_is_not_compared(sizes: tuple[float, float]) -> None:
    """Adam makes a full step for any gradient, however small. If the gradient is only rounding, the direction differs.

    The parameter is then left out for good, because it differs from then on.
    """
    runs = []
    for number, sign in enumerate(sizes, 1):
        small = sketch("b", BIAS * numpy.float32(1e-9 * sign))
        lines = [
            line(
                step,
                [["a"]],
                weights=[],
                tensors={"w": sketch("w", WEIGHT), "b": small if step == 1 else sketch("b", BIAS)},
                parameters={"b": sketch("b", BIAS + step * number * numpy.float32(0.1) * numpy.sign(BIAS))},
            )
            for step in (1, 2)
        ]
        runs.append(RunRecord(number, tuple(lines)))
    its = compare(*runs)
    found = [(one.step, one.kind) for one in its.differences]
    assert found == ([(1, "parameters")] if sizes == (1.0, 1.0) else [])


@pytest.mark.parametrize(("count", "differs"), [(600, False), (7, True)])
def test_what_follows_from_rounding_in_a_loop_of_its_own(count: int, differs: bool) -> None:
    """In such a loop parameters have the names of world.broadcast, and means have others. Their sizes match them."""
    noise = numpy.random.default_rng(3).standard_normal((2, count)).astype("float32")
    large = sketch("large", WEIGHT * 1000)
    lines = []
    for ranks, its in zip((1, 2), noise, strict=True):
        means = {"large": large, "the result": sketch("the result", its * numpy.float32(1e-6))}
        values = [sketch("['w']", WEIGHT), sketch("['w']", WEIGHT * numpy.float32(1 + 0.1 * ranks))]
        usual: dict[str, Any] = {"kind": MEAN, "tensors": means, "parameters": {}, "weights": []}
        lines.append(
            [line(at, [["a"]] * ranks, before={"['w']": value}, **usual) for at, value in enumerate(values, 1)]
        )
    its = compare(RunRecord(1, tuple(lines[0])), RunRecord(2, tuple(lines[1])))
    texts = [found.text for found in its.differences if found.kind == "parameters"]
    assert [text.partition(" by ")[0] for text in texts] == ["['w']: changed before call 2 began"] * differs


def test_arrays_of_world_sync_whose_size_depends_on_the_ranks() -> None:
    """Such arrays are no parameters."""
    alone, together = (
        RunRecord(ranks, (line(1, [["a"]], before={"['rows']": sketch("['rows']", WEIGHT[:ranks])}),))
        for ranks in (1, 2)
    )
    assert compare(alone, together).differences == []


def test_a_learning_rate_must_be_the_same() -> None:
    expected = (2, "learning rate", "0.1 on 1 rank, 0.10000000000000002 on 2")
    assert only(compare(*records(2, learning_rate=math.nextafter(0.1, 1)))) == expected


def test_the_first_difference_is_by_step_and_then_by_kind() -> None:
    alone, together = records(2, loss=9.0, samples=[["e"], ["f", "g", "x"]])
    changed = dataclasses.replace(together.lines[2], learning_rate=0.2, loss=8.0)
    found = compare(alone, RunRecord(2, (*together.lines[:2], changed))).differences
    assert [(one.step, one.kind) for one in found] == [(2, "samples"), (2, "loss"), (3, "learning rate")]


def test_runs_of_unequal_lengths_and_kinds() -> None:
    alone, together = records()
    fewer = RunRecord(2, together.lines[:2])
    assert only(compare(alone, fewer)) == (3, "calls", "3 steps on 1 rank, 2 on 2")
    assert only(compare(*records(2, kind=SUM))) == (2, "calls", "step on 1 rank, sum on 2")
    tensors = {"w": sketch("w", WEIGHT[1:]), "b": sketch("b", BIAS)}
    text = "w: 600 elements of float32 on 1 rank, 580 elements of float32 on 2"
    assert only(compare(*records(3, tensors=tensors))) == (3, "calls", text)
    text = "w: 600 elements of float32 on 1 rank, nothing on 2"
    only_b = {"b": sketch("b", BIAS)}
    assert only(compare(*records(3, tensors=only_b))) == (3, "calls", text)
    assert only(compare(*records(3, parameters=only_b))) == (3, "calls", text)
    assert only(compare(*records(3, metrics={})))[2] == "only one of the runs has accuracy"


def test_report_of_equal_runs() -> None:
    both = records()
    assert list(report(*both, compare(*both))) == [
        "1 rank and 2, 3 steps; allowed relative difference 0.00024 (from float32)",
        "  samples        12 values, the same",
        "  weights        3 values, the same",
        "  loss           3 values, largest relative difference 0",
        "  gradients      6 values, largest relative difference 0",
        "  learning rate  3 values, the same",
        "  parameters     8 values, largest relative difference 0",
        "  metrics        1 values, largest relative difference 0",
    ]


def test_report_of_a_difference() -> None:
    both = records(3, learning_rate=0.2, samples=None)
    found = list(report(*both, compare(*both)))
    assert found[5:] == [
        "  learning rate  differ in step 3",
        "  parameters     8 values, largest relative difference 0",
        "  metrics        1 values, largest relative difference 0",
        "first difference: step 3, learning rate: 0.1 on 1 rank, 0.2 on 2",
    ]


def test_values_whose_squares_are_no_floats() -> None:
    huge, more = (sketch("w", numpy.full(4, value)) for value in (1.0, 1.5))
    for one in (huge, more):
        one["norm"] *= 2.0**600
        one["projections"] = [value * 2.0**600 for value in one["projections"]]
    alone = RunRecord(1, (line(1, [["a"]], tensors={"w": huge}),))
    assert compare(alone, alone).largest["gradients"] == (0.0, 1, "w")
    its = compare(alone, RunRecord(2, (line(1, [["a"]], tensors={"w": more}),)))
    small = [
        RunRecord(1, (line(1, [["a"]], tensors={"w": sketch("w", numpy.full(4, value))}),)) for value in (1.0, 1.5)
    ]
    assert its.largest["gradients"] == compare(*small).largest["gradients"]


def test_a_norm_of_zero_with_other_projections() -> None:
    """No Recorder writes such a record. The comparison reports a difference, and does not divide by zero."""
    none, some = (sketch("w", numpy.zeros(3)) for _ in range(2))
    some["projections"][0] = 1.0
    alone = RunRecord(1, (line(1, [["a"]], tensors={"w": none}),))
    together = RunRecord(2, (line(1, [["a"]], tensors={"w": some}),))
    assert only(compare(alone, together))[:2] == (1, "gradients")
    assert compare(alone, together).largest["gradients"] == (math.inf, 1, "w")


def test_steps_in_which_each_rank_uses_its_own_gradients() -> None:
    """From the second step on, only samples, weights and rates have to be the same, and the loss of that step."""
    alone, together = records()
    lines = list(together.lines)
    changes: dict[str, Any] = {
        "tensors": {"w": sketch("w", WEIGHT * 9), "b": sketch("b", BIAS)},
        "parameters": parameters(9),
    }
    lines[1] = dataclasses.replace(lines[1], alone=True, **changes)
    lines[2] = dataclasses.replace(lines[2], alone=True, loss=7.0, metrics={"accuracy": 0.1}, **changes)
    its = compare(alone, dataclasses.replace(together, lines=tuple(lines)))
    assert its.differences == []
    assert its.alone_from == 2
    assert its.counts == {"samples": 12, "weights": 3, "loss": 2, "gradients": 2, "learning rate": 3, "parameters": 4}
    (text,) = [line for line in report(alone, together, its) if "trains by itself" in line]
    assert text.startswith(
        "  from step 2 on, each rank trains by itself, so its steps differ from those of 1 rank: only"
    )
    for change, kind in (
        ({"loss": 7.0}, "loss"),
        ({"learning_rate": 0.2}, "learning rate"),
        ({"weights": [9.0, 1.0]}, "weights"),
        ({"samples": [["e"], ["f", "g", "g"]]}, "samples"),
        ({"before": {"w": sketch("w", WEIGHT * 2)}}, "parameters"),
    ):
        wrong = dataclasses.replace(lines[1], **change)
        found = compare(alone, dataclasses.replace(together, lines=(lines[0], wrong, lines[2]))).differences
        assert [one.kind for one in found] == [kind]
