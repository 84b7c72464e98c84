"""Where two records first differ, and what is said of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain.errors import DataError
from mpitrain.verify.compare import Comparison, compare
from mpitrain.verify.comparison_report import report
from mpitrain.verify.fingerprint import sketch
from mpitrain.verify.run_record import MEAN, STEP, SUM, Line, RunRecord, read_record

WEIGHT = numpy.random.default_rng(0).standard_normal((30, 20)).astype("float32")
BIAS = numpy.random.default_rng(1).standard_normal(20).astype("float32")


def line(number: int, ranks: list[list[str]], **other: Any) -> Line:
    usual = {
        "number": number,
        "kind": STEP,
        "samples": ranks,
        "weights": [float(len(seen)) for seen in ranks],
        "tensors": {"w": sketch("w", WEIGHT * number), "b": sketch("b", BIAS)},
        "precision": "float32",
        "loss": 1.0 / number,
        "learning_rate": 0.1,
        "metrics": {"accuracy": 0.5} if number == 3 else {},
    }
    return Line(**{**usual, **other})


def records(at: int = 0, **other: Any) -> tuple[RunRecord, RunRecord]:
    """Three steps of four samples on 1 rank and on 2, equal but for what is `other` in step `at` of the latter."""
    samples = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["i", "j", "k", "l"]]
    alone = [line(number, [its]) for number, its in enumerate(samples, 1)]
    together = [line(number, [its[:3], its[3:]]) for number, its in enumerate(samples, 1)]
    if at:
        together[at - 1] = dataclasses.replace(together[at - 1], **other)
    return RunRecord(1, tuple(alone)), RunRecord(2, tuple(together))


def only(its: Comparison) -> tuple[int, str, str]:
    (found,) = its.differences
    return found.step, found.kind, found.text


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
        "metrics": 1,
    }
    assert {kind: value[0] for kind, value in its.largest.items()} == {"loss": 0.0, "gradients": 0.0, "metrics": 0.0}


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


@pytest.mark.parametrize(("kind", "value"), [("loss", 0.5), ("metrics", {"accuracy": 0.5})])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_values_are_compared_with_the_tolerance(kind: str, value: Any, factor: float) -> None:
    """The loss of step 2 is 0.5, and the largest so far 1: a difference counts relative to that."""
    apart = factor * 2.0**-12
    if kind == "loss":
        at, other = 2, {"loss": 0.5 + apart}
    else:
        at, other = 3, {"metrics": {"accuracy": 0.5 - 0.5 * apart}}
    its = compare(*records(at, **other))
    assert its.largest[kind][0] == pytest.approx(apart, rel=1e-6)
    if factor < 1:
        assert its.differences == []
    else:
        step, found, text = only(its)
        assert (step, found) == (at, kind)
        assert "on 1 rank, " in text
        assert text.endswith("a relative difference of 0.00027, allowed is 0.00024")


def test_a_loss_that_is_no_number_differs() -> None:
    assert only(compare(*records(2, loss=math.nan)))[:2] == (2, "loss")


def test_the_gradient_that_differs_is_named_with_its_norms() -> None:
    other = WEIGHT * 2
    other[3, 4] += 5.0
    tensors = {"w": sketch("w", other), "b": sketch("b", BIAS)}
    step, kind, text = only(compare(*records(2, tensors=tensors)))
    assert (step, kind) == (2, "gradients")
    norms = [f"{numpy.linalg.norm(array.astype(float)):.6g}" for array in (WEIGHT * 2, other)]
    assert text.startswith(f"w: norm {norms[0]} on 1 rank, {norms[1]} on several, 5 apart: a relative difference of 0.")


def test_all_gradients_that_differ_are_counted() -> None:
    tensors = {"w": sketch("w", WEIGHT), "b": sketch("b", -BIAS)}
    text = only(compare(*records(3, tensors=tensors)))[2]
    assert text.startswith("w: ")
    assert text.endswith("; so do 1 more of 2")


def test_a_gradient_of_rounding_alone_is_no_difference() -> None:
    """A thousandth of a millionth of the other gradients, and of another sign."""
    small = BIAS * numpy.float32(1e-9)
    one, several = (
        line(1, [["a"]], tensors={"w": sketch("w", WEIGHT), "b": sketch("b", its)}) for its in (small, -small)
    )
    assert compare(RunRecord(1, (one,)), RunRecord(2, (several,))).differences == []


def test_a_learning_rate_must_be_the_same() -> None:
    expected = (2, "learning rate", "0.1 on 1 rank, 0.10000000000000002 on 2")
    assert only(compare(*records(2, learning_rate=math.nextafter(0.1, 1)))) == expected


def test_the_order_of_samples_and_who_has_them_does_not_matter() -> None:
    assert compare(*records(2, samples=[["h"], ["g", "e", "f"]])).differences == []


GROWS = "the global batch grows with the number of ranks: divide it by world.size for each rank"
OTHERS = (
    "samples that the batch on 1 rank does not hold: another order, or changes that depend on the rank (a seed with "
    "the rank in it?)"
)


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        ([["e", "f", "g"], ["g"]], ["1 sample READ number 2 (from 0) of the batch there, by ranks 0, 1", "LOST 3"]),
        ([["e", "f", "g", "g"], []], ["1 sample READ number 2 (from 0) of the batch there, by rank 0", "LOST 3"]),
        (
            [["e", "f", "g", "h"], ["e", "f", "g", "h"]],
            [
                "4 samples on 1 rank, 8 on 2",
                GROWS,
                "4 samples READ number 0 (from 0) of the batch there, by ranks 0, 1",
            ],
        ),
        ([["e", "f", "g"], ["y"]], [f"1 {OTHERS.replace('samples', 'sample', 1)}", "LOST 3"]),
        (
            [["e", "f", "x"], ["y"]],
            [f"2 {OTHERS}", "2 of the batch on 1 rank read by no rank, such as number 2 (from 0)"],
        ),
        ([["e", "f"], ["g"]], ["4 samples on 1 rank, 3 on 2", "LOST 3"]),
    ],
    ids=["twice", "twice on one rank", "global batch", "another", "two others", "missing"],
)
def test_samples(samples: list[list[str]], parts: list[str]) -> None:
    text = "; ".join(parts).replace("READ", "read more often than on 1 rank, such as")
    lost = "of the batch on 1 rank read by no rank, such as number"
    text = text.replace("of LOST 2", f"{lost} 2 (from 0)").replace("LOST 3", f"1 {lost} 3 (from 0)")
    assert only(compare(*records(2, samples=samples))) == (2, "samples", text)


def test_samples_that_were_not_seen_are_not_compared() -> None:
    its = compare(*records(2, samples=None))
    assert its.differences == []
    assert its.counts["samples"] == 8


def test_weights() -> None:
    assert only(compare(*records(2, weights=[3.0, 3.0]))) == (2, "weights", "4 on 1 rank, 6 on 2 (3, 3)")
    text = only(compare(*records(2, weights=[1.0, 1.0])))[2]
    assert text == "4 on 1 rank, 2 on 2 (1, 1); every rank has weight 1, so this is a mean by ranks and not by samples"


def test_means_without_weights_are_judged_by_their_results() -> None:
    def both(other: numpy.ndarray) -> tuple[RunRecord, RunRecord]:
        lines = [
            line(1, [], kind=MEAN, samples=None, weights=[1.0] * n, tensors={"w": sketch("w", its)}, loss=None)
            for n, its in ((1, WEIGHT), (2, other))
        ]
        return RunRecord(1, (lines[0],)), RunRecord(2, (lines[1],))

    assert compare(*both(WEIGHT)).differences == []
    assert only(compare(*both(WEIGHT + 1)))[2].endswith(
        "; every rank has weight 1: with weight=len(x) it is the mean over samples"
    )


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
    assert only(compare(*records(3, tensors={"b": sketch("b", BIAS)}))) == (3, "calls", text)
    assert only(compare(*records(3, metrics={})))[2] == "accuracy is there in one of the runs only"


def test_report_of_equal_runs() -> None:
    both = records()
    assert list(report(*both, compare(*both))) == [
        "1 rank and 2, 3 steps; allowed relative difference 0.00024 (from float32)",
        "  samples        12 values, the same",
        "  weights        3 values, the same",
        "  loss           3 values, largest relative difference 0",
        "  gradients      6 values, largest relative difference 0",
        "  learning rate  3 values, the same",
        "  metrics        1 values, largest relative difference 0",
    ]


def test_report_of_a_difference() -> None:
    both = records(3, learning_rate=0.2, samples=None)
    found = list(report(*both, compare(*both)))
    assert found[5:] == [
        "  learning rate  differ in step 3",
        "  metrics        1 values, largest relative difference 0",
        "first difference: step 3, learning rate: 0.1 on 1 rank, 0.2 on 2",
    ]


@pytest.mark.parametrize("content", [None, "", '{"num_ranks": 1}\n{"number": 1, "ki'], ids=["none", "empty", "cut off"])
def test_a_record_that_is_not_whole(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "record.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"there is no whole record in .* --directory on a file system"):
        read_record(tmp_path)
