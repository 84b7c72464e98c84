"""What the probe of virtual ranks says of each finding. tests/ranks/test_virtual_ranks.py has the probe itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitrain.strategies.virtual_ranks import ProbeFinding, judge

NAMES = ["rank 0 on lab1", "rank 1 on lab1", "rank 2 on lab2"]
GOOD = ProbeFinding(
    {"the gradient of w": "a", "the gradient of b": "b", "the loss": "c"},
    "",
    "",
    "openblas 1",
    "openblas 0.3 Zen",
    "EPYC",
)
OTHER = {**GOOD.digests, "the gradient of b": "x"}


def test_equal_findings_are_good() -> None:
    assert judge([GOOD] * 3, NAMES) == ""


def test_where_processors_differ_but_bits_do_not() -> None:
    assert judge([GOOD, GOOD, replace(GOOD, processor="Xeon", threads="openblas 4", kernels="mkl")], NAMES) == ""


@pytest.mark.parametrize(
    ("different", "remedy"),
    [
        ({"threads": "openblas 2"}, "Set OMP_NUM_THREADS to the same number on all hosts"),
        ({"processor": "Xeon"}, "OPENBLAS_CORETYPE"),
        ({"kernels": "openblas 0.3 Haswell"}, "Install the same versions"),
        ({}, "does the model read something that differs by rank"),
    ],
)
def test_a_rank_with_other_bits_and_what_to_do(different: dict[str, str], remedy: str) -> None:
    odd = replace(GOOD, digests=OTHER, **different)
    text = judge([GOOD, GOOD, odd], NAMES)
    assert text.startswith(
        "rank 2 on lab2: the gradient of b has other bits than on rank 0 on lab1, of the same samples"
    )
    assert odd.place in text and GOOD.place in text
    assert remedy in text


def test_a_missing_gradient_is_a_difference() -> None:
    digests = {"the gradient of w": "a", "the loss": "c"}
    assert "the gradient of b has other bits" in judge([GOOD, replace(GOOD, digests=digests)], NAMES[:2])


def test_a_second_pass_with_other_bits_comes_first() -> None:
    """A model that is not reproducible differs between ranks too, and that is not its fault."""
    text = judge([GOOD, replace(GOOD, digests=OTHER, again="the loss"), GOOD], NAMES)
    assert text.startswith("rank 1 on lab1: the loss has other bits when the same virtual rank is computed again")
