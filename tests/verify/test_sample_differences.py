"""Samples and weights in which two runs differ."""

from __future__ import annotations

import numpy
import pytest
from made_up_runs import WEIGHT, line, only, records

from mpitrain.verify.compare import compare
from mpitrain.verify.fingerprint import sketch
from mpitrain.verify.record_file import MEAN, RunRecord


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
