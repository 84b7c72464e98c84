"""Where two records first differ, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

from jobs import run_command
from mpitrain.errors import DataError
from mpitrain.verify.compare import compare
from mpitrain.verify.comparison import Comparison
from mpitrain.verify.comparison_report import report
from mpitrain.verify.fingerprint import Sketch, sketch
from mpitrain.verify.record_file import MEAN, STEP, SUM, Line, RunRecord, make_record, read_record

WEIGHT = numpy.random.default_rng(0).standard_normal((30, 20)).astype("float32")
BIAS = numpy.random.default_rng(1).standard_normal(20).astype("float32")


def parameters(number: int) -> dict[str, Sketch]:
    """As they are after so many steps: a hundredth of the gradients has been taken from them in each."""
    changes = [numpy.float32(0.01) * WEIGHT * step for step in range(1, number + 1)]
    return {"w": sketch("w", WEIGHT - sum(changes)), "b": sketch("b", BIAS - numpy.float32(0.01 * number) * BIAS)}


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
        "before": parameters(0) if number == 1 else {},
        "parameters": parameters(number),
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
        "parameters": 8,  # and their first values
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
    """What a step makes of them is not compared: it cannot be the same."""
    tensors = {"w": sketch("w", WEIGHT), "b": sketch("b", -BIAS)}
    text = only(compare(*records(3, tensors=tensors, parameters=parameters(0))))[2]
    assert text.startswith("w: ")
    assert text.endswith("; 2 of 2 differ")


def test_a_gradient_of_rounding_alone_is_no_difference() -> None:
    """A thousandth of a millionth of the other gradients, and of another sign."""
    small = BIAS * numpy.float32(1e-9)
    one, several = (
        line(1, [["a"]], tensors={"w": sketch("w", WEIGHT), "b": sketch("b", its)}) for its in (small, -small)
    )
    assert compare(RunRecord(1, (one,)), RunRecord(2, (several,))).differences == []


def changed(name: str, number: int, factor: float) -> dict[str, Sketch]:
    """As `parameters`, but that this step has changed one of them by so much more."""
    value, change = {"w": (WEIGHT, 0.01 * number * WEIGHT), "b": (BIAS, 0.01 * BIAS)}[name]
    steps = number * (number - 1) / 2 if name == "w" else number - 1
    earlier = value.astype(float) * (1 - 0.01 * steps)
    return parameters(number) | {name: sketch(name, (earlier - factor * change).astype("float32"))}


@pytest.mark.parametrize("factor", [1 + 0.9 * 2.0**-6, 1 + 1.1 * 2.0**-6])
def test_what_a_step_changes_is_compared_to_a_quarter_of_the_digits(factor: float) -> None:
    """Of the change, which is a hundredth of the parameter."""
    its = compare(*records(1, parameters=changed("b", 1, factor)))
    assert its.largest["parameters"][0] == pytest.approx(1 - 1 / factor, rel=0.05)
    assert [(one.step, one.kind) for one in its.differences[:1]] == ([] if factor < 1.015 else [(1, "parameters")])


def test_the_parameter_that_is_changed_otherwise_is_named() -> None:
    """In the last step, where no gradient can tell."""
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
    """It comes before all that follows from it."""
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
    """It is found as what it is, and not as the gradient that follows from it."""
    other = {"b": sketch("b", BIAS * numpy.float32(0.9))}
    alone, together = records(2, before=other, loss=7.0)
    if both:
        alone = RunRecord(1, (alone.lines[0], dataclasses.replace(alone.lines[1], before=other), alone.lines[2]))
    found = compare(alone, together).differences
    assert [(one.step, one.kind) for one in found] == ([] if both else [(1, "parameters")]) + [(2, "loss")]
    if not both:
        assert found[0].text.startswith("b: changed before step 2 began by 0 on 1 rank, by ")


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, -1.0)], ids=["the same", "of rounding alone"])
def test_what_follows_from_rounding_is_not_compared(sizes: tuple[float, float]) -> None:
    """Adam makes full steps of a gradient however small, and in another direction if that is of rounding alone.

    It is then left out for good, since it is another one from then on.
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
    """There parameters have names of world.sync, and means have others: they belong together by their sizes."""
    noise = numpy.random.default_rng(3).standard_normal((2, count)).astype("float32")
    large = sketch("large", WEIGHT * 1000)
    lines = []
    for ranks, its in zip((1, 2), noise, strict=True):
        means = {"large": large, "the result": sketch("the result", its * numpy.float32(1e-6))}
        values = [sketch("['w']", WEIGHT), sketch("['w']", WEIGHT * numpy.float32(1 + 0.1 * ranks))]
        lines.append(
            [
                line(
                    number,
                    [["a"]] * ranks,
                    kind=MEAN,
                    tensors=means,
                    before={"['w']": value},
                    parameters={},
                    weights=[],
                )
                for number, value in enumerate(values, 1)
            ]
        )
    its = compare(RunRecord(1, tuple(lines[0])), RunRecord(2, tuple(lines[1])))
    texts = [found.text for found in its.differences if found.kind == "parameters"]
    assert [text.partition(" by ")[0] for text in texts] == ["['w']: changed before call 2 began"] * differs


def test_arrays_of_world_sync_whose_size_depends_on_the_ranks() -> None:
    """They are no parameters."""
    alone, together = (
        RunRecord(ranks, (line(1, [["a"]], before={"['rows']": sketch("['rows']", WEIGHT[:ranks])}),))
        for ranks in (1, 2)
    )
    assert compare(alone, together).differences == []


def test_changes_below_the_rounding_of_a_parameter() -> None:
    """In bfloat16 a small change may be none, or twice as large."""
    other = BIAS * (1 + 2.0**-8)
    runs = []
    for number, after in enumerate((BIAS, other), 1):
        values = [sketch("b", its.astype(ml_dtypes.bfloat16)) for its in (BIAS, after)]
        same = {"b": sketch("b", BIAS)}
        lines = (line(1, [["a"]], weights=[], tensors=same, before={"b": values[0]}, parameters={"b": values[1]}),)
        runs.append(RunRecord(number, lines))
    assert runs[0].lines[0].parameters != runs[1].lines[0].parameters
    assert compare(*runs).differences == []


def test_a_learning_rate_must_be_the_same() -> None:
    expected = (2, "learning rate", "0.1 on 1 rank, 0.10000000000000002 on 2")
    assert only(compare(*records(2, learning_rate=math.nextafter(0.1, 1)))) == expected


def test_the_order_of_samples_and_who_has_them_does_not_matter() -> None:
    assert compare(*records(2, samples=[["h"], ["g", "e", "f"]])).differences == []


GROWS = "the global batch grows with the number of ranks: divide it by world.size for each rank"
OTHERS = (
    "samples that the batch on 1 rank does not hold: the order differs, or the samples are changed depending on the "
    "rank (does a seed depend on the rank?)"
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
    assert text == "4 on 1 rank, 2 on 2 (1, 1); every rank has weight 1, so this is a mean over ranks, not over samples"


def test_means_without_weights_are_judged_by_their_results() -> None:
    def both(other: numpy.ndarray) -> tuple[RunRecord, RunRecord]:
        lines = [
            line(1, [], kind=MEAN, samples=None, weights=[1.0] * n, tensors={"w": sketch("w", its)}, loss=None)
            for n, its in ((1, WEIGHT), (2, other))
        ]
        return RunRecord(1, (lines[0],)), RunRecord(2, (lines[1],))

    assert compare(*both(WEIGHT)).differences == []
    assert only(compare(*both(WEIGHT + 1)))[2].endswith(
        "; every rank has weight 1: weight=len(x) gives the mean over samples"
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


@pytest.mark.parametrize("content", [None, '{"num_ranks": 1}\n{"number": 1, "ki'], ids=["none", "cut off"])
def test_a_record_that_is_not_whole(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "record.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"there is no complete record in .* --directory with a folder"):
        read_record(tmp_path)


def test_a_record_that_nobody_has_begun(tmp_path: Path) -> None:
    make_record(tmp_path)
    with pytest.raises(DataError, match=r"^the script made no World, so there is nothing to compare"):
        read_record(tmp_path)


def written(folder: Path, content: list[Any]) -> Path:
    (folder / "record.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in content))
    return folder


def plain() -> list[Any]:
    """A record as it is in the file."""
    return [{"num_ranks": 2}, *(dataclasses.asdict(entry) for entry in records()[1].lines)]


def test_a_record_comes_back(tmp_path: Path) -> None:
    assert read_record(written(tmp_path, plain())) == records()[1]


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ((0, "num_ranks"), "2", "ValueError: num_ranks is '2'; it must be a number of ranks"),
        ((0, "num_ranks"), 0, "ValueError: num_ranks is 0; it must be a number of ranks"),
        ((0,), {}, "KeyError: 'num_ranks'"),
        ((0,), [1], "TypeError: list indices must be integers or slices, not str"),
        ((1,), None, "TypeError: mpitrain.verify.record_file.Line() argument after ** must be a mapping, not NoneType"),
        ((1, "more"), 1, "TypeError: Line.__init__() got an unexpected keyword argument 'more'"),
        ((2, "number"), 7, "ValueError: line 3 is of call 7, kind 'step', dtype 'float32'"),
        ((2, "kind"), "sums", "ValueError: line 3 is of call 2, kind 'sums', dtype 'float32'"),
        ((2, "precision"), None, "ValueError: line 3 is of call 2, kind 'step', dtype None"),
        ((2, "weights"), [1.0, -1.0], "ValueError: line 3 has the weights [1.0, -1.0]; they must be 0 or more"),
        ((2, "weights"), [True], "TypeError: True is not a number"),
        ((2, "samples"), [[1]], "ValueError: line 3 has samples that are not hashes"),
        ((2, "loss"), "1", "TypeError: '1' is not a number"),
        ((2, "learning_rate"), 10**400, "OverflowError: int too large to convert to float"),
        ((2, "metrics"), [1], "AttributeError: 'list' object has no attribute 'items'"),
        ((2, "tensors"), None, "AttributeError: 'NoneType' object has no attribute 'items'"),
        ((2, "tensors", "w"), {}, "KeyError: 'count'"),
        ((1, "before", "w"), {}, "KeyError: 'count'"),
        ((2, "parameters", "w"), {}, "KeyError: 'count'"),
        ((2, "tensors", "w", "count"), -1, "ValueError: w has -1 elements and 8 projections, not 8"),
        ((2, "tensors", "w", "projections"), [1.0], "ValueError: w has 600 elements and 1 projections, not 8"),
        ((2, "tensors", "w", "dtype"), ["float32"], "TypeError: w has the dtype ['float32']"),
    ],
)
def test_a_record_with_other_values(tmp_path: Path, place: tuple[Any, ...], value: Any, why: str) -> None:
    content: Any = plain()
    at = content
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(DataError) as caught:
        read_record(written(tmp_path, content))
    assert str(caught.value) == (
        f"there is no complete record in {tmp_path} ({why}). Rank 0 writes the record on its host. "
        "If that is another host, use mpitrain verify --directory with a folder that both hosts share"
    )


def test_a_record_of_brackets(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("[" * 200_000)
    with pytest.raises(DataError, match="RecursionError: maximum recursion depth exceeded"):
        read_record(tmp_path)


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
    """No Recorder writes that. It is a difference, not a division by zero."""
    none, some = (sketch("w", numpy.zeros(3)) for _ in range(2))
    some["projections"][0] = 1.0
    alone = RunRecord(1, (line(1, [["a"]], tensors={"w": none}),))
    together = RunRecord(2, (line(1, [["a"]], tensors={"w": some}),))
    assert only(compare(alone, together))[:2] == (1, "gradients")
    assert compare(alone, together).largest["gradients"] == (math.inf, 1, "w")


def test_the_file_is_the_launchers(tmp_path: Path) -> None:
    make_record(tmp_path)
    status = (tmp_path / "record.jsonl").lstat()
    assert (stat.filemode(status.st_mode), status.st_size) == ("-rw-------", 0)
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "record.jsonl").unlink()
    (tmp_path / "record.jsonl").symlink_to("precious")
    make_record(tmp_path)  # in its place, not through it
    assert not (tmp_path / "record.jsonl").is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"


SCRIPT = "import mpitrain as mt; world = mt.init(); world.mean(1.0); print('it went on')"


@pytest.mark.parametrize("kind", ["link", "hard link", "mode", "fifo", "folder"])
def test_a_rank_writes_into_no_other_file(tmp_path: Path, kind: str) -> None:
    """What its environment names may be any file of the user."""
    make_record(tmp_path)
    record, precious = tmp_path / "record.jsonl", tmp_path / "precious"
    record.rename(precious)
    precious.write_text("mine")
    links = 1
    if kind == "link":
        record.symlink_to("precious")
    elif kind == "hard link":
        record.hardlink_to(precious)
        links = 2
    elif kind == "mode":
        precious.rename(record)
        record.chmod(0o644)
        precious = record
    elif kind == "fifo":
        os.mkfifo(record, 0o600)
    else:
        record.mkdir()
    what = {
        "link": "is a link",
        "fifo": "cannot be opened (No such device or address)",
        "folder": "cannot be opened (Is a directory)",
    }
    mode = "-rw-r--r--" if kind == "mode" else "-rw-------"
    problem = what.get(kind, f"is {mode}, owner {os.geteuid()}, {links} links")
    environment = {"_MPITRAIN_VERIFY_RECORD": str(tmp_path), "_MPITRAIN_VERIFY_STEPS": "1"}
    job = run_command([sys.executable, "-c", SCRIPT], env=environment)
    assert (job.code, job.stdout) == (1, ""), job.output
    assert f"the record {record} {problem}. It must be the file that mpitrain verify has made" in job.stderr
    assert precious.read_text() == "mine"
