"""Trees, calls and weights that World refuses, on every rank."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpitrain import World, collectives
from mpitrain.errors import DataError, MismatchError, TreeError

from .common import error_on_all, named_ranks, skip_alone


@pytest.mark.parametrize(
    ("operation", "tree", "text"),
    [
        ("broadcast", {"a": ["text"]}, r"leaf \['a'\]\[0\] is a str"),
        ("broadcast", {1, 2}, r"leaf at the top is a set.* World.broadcast_object and World.allgather send any object"),
        ("broadcast", [numpy.array([None])], r"leaf \[0\] is an array of Python objects"),
        ("broadcast", fractions.Fraction(1, 2), "is a Fraction"),
        ("sum", [decimal.Decimal(1)], r"leaf \[0\] is a Decimal"),
        ("broadcast", {"n": 2**63}, r"leaf \['n'\] is the number 9223372036854775808; it must fit into 64 bits"),
        ("sum", {"n": -(2**63) - 1}, "must fit into 64 bits"),
        ("sum", {"mask": numpy.ones(2, bool)}, r"sum of \['mask'\]: its dtype is bool; allowed are float16"),
        ("sum", numpy.ones(2, complex), "sum of the tree: its dtype is complex128"),
        ("sum", numpy.ones(2, ">f4"), "its dtype is >f4"),
        ("sum", numpy.ones(2, "M8[s]"), r"its dtype is datetime64\[s\]"),
        ("mean", {"n": numpy.ones(2, int)}, r"mean of \['n'\]: its dtype is int64; allowed are float16"),
        ("mean", 1j, "its dtype is complex128"),
    ],
)
def test_tree_errors(world: World, operation: str, tree: Any, text: str) -> None:
    with pytest.raises(TreeError, match=text):
        getattr(world, operation)(tree)
    assert world.sum(1) == world.size


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(2**62, "int64"), (-(2**62), "int64"), (numpy.int64(2**62), "int64"), (numpy.uint8(200), "uint8")],
)
def test_a_sum_of_numbers_does_not_wrap(world: World, number: Any, dtype: str) -> None:
    if world.size < 3:
        pytest.skip("needs three ranks")
    total = int(number) * world.size
    text = error_on_all(world, TreeError, lambda: world.sum({"a": 1, "n": number}))
    assert text.startswith(f"sum of ['n']: {total} does not fit into {dtype}")
    assert sum(world.allgather(int(number))) == total  # the remedy
    if world.size == 3:  # the largest multiples that fit
        assert world.sum([2**61 - 1, numpy.uint64(2**61), -1]) == [3 * (2**61 - 1), 3 * 2**61, -3]


class Units(numpy.ndarray):
    """Has more than values."""


@pytest.mark.parametrize("kind", [numpy.ma.MaskedArray, Units, numpy.rec.recarray, numpy.matrix])
def test_subclasses_are_kept_or_refused_by_name(world: World, kind: Any, tmp_path: Any) -> None:
    array = numpy.ones((2, 2)).view(kind)
    calls = [
        world.broadcast,
        world.sum,
        world.mean,
        world.where,
        lambda one: collectives.allreduce(world, one).wait(),
        lambda one: world.sum({"a": [one]})["a"][0],
    ]
    for call in calls:
        if kind in (numpy.matrix, numpy.rec.recarray):
            assert call is calls[3] or type(call(array)) is kind
        else:
            with pytest.raises(TreeError, match=kind.__name__):
                call(array)
    mapped = numpy.memmap(tmp_path / "x", numpy.float64, "w+", shape=(3,))
    assert type(world.sum(mapped)) is numpy.ndarray
    assert [type(one) for one in world.allgather(array)] == [kind] * world.size
    assert type(world.broadcast_object(array)) is kind


MISMATCHES = {
    "shape": ({"w": numpy.zeros(3)}, {"w": numpy.zeros(4)}, "['w'] float64 (3,)", "['w'] float64 (4,)"),
    "dtype": ([numpy.zeros(3)], [numpy.zeros(3, "f4")], "[0] float64 (3,)", "[0] float32 (3,)"),
    "dimensions": (numpy.zeros((1, 3)), numpy.zeros(3), "the tree float64 (1, 3)", "the tree float64 (3,)"),
    "a leaf less": ({"a": 1.0, "b": 2.0}, {"a": 1.0}, "['b'] number float", "nothing more"),
    "a leaf more": ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "nothing more", "['b'] number float"),
    "name": ({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}, "['b'] number float", "['c'] number float"),
    "nesting": ({"a": [1.0]}, {"a": [[1.0]]}, "['a'][0] number float", "['a'][0][0] number float"),
    "none": ({"a": 1.0, "b": 1.0}, {"a": None, "b": 1.0}, "['a'] number float", "['b'] number float"),
    "nothing": ([1.0], [], "[0] number float", "an empty tree"),
    "number for array": ([numpy.array(1.0)], [1.0], "[0] float64 ()", "[0] number float"),
    "kind of number": ([1.0], [1], "[0] number float", "[0] number int"),
    "kind of NumPy number": ([numpy.float64(1)], [numpy.float32(1)], "[0] number float64", "[0] number float32"),
}


SYNC_ONLY = {
    "unit": (
        [numpy.datetime64(1, "D")],
        [numpy.datetime64(1, "s")],
        "[0] number datetime64[D]",
        "[0] number datetime64[s]",
    ),
    "length of text": ([numpy.str_("abc")], [numpy.str_("de")], "[0] number <U3", "[0] number <U2"),
    "byte order": ([numpy.zeros(3, ">f4")], [numpy.zeros(3, "<f4")], "[0] >f4 (3,)", "[0] float32 (3,)"),
}


# A mean makes a float of every number, so there their kinds may differ.
KINDS = {"kind of number", "kind of NumPy number"}


CASES = [(operation, name) for operation in ("broadcast", "sum") for name in MISMATCHES]


CASES += [("mean", name) for name in MISMATCHES if name not in KINDS]


CASES += [("broadcast", name) for name in SYNC_ONLY]


@pytest.mark.parametrize(("operation", "case"), CASES)
def test_different_trees_are_an_error_on_every_rank(world: World, operation: str, case: str) -> None:
    skip_alone(world)
    usual, other, usual_text, other_text = {**MISMATCHES, **SYNC_ONLY}[case]
    # Every position is tried with broadcast; the others share its code, so one position each will do.
    for odd in range(world.size) if operation == "broadcast" else [len(case) % world.size]:
        tree = other if world.rank == odd else usual
        text = error_on_all(world, MismatchError, lambda tree=tree: getattr(world, operation)(tree))
        named, root = named_ranks(world, odd)
        first, second = (other_text, usual_text) if odd else (usual_text, other_text)
        if operation == "mean":
            first, second = (line.replace("number float", "number") for line in (first, second))
        assert text.startswith(f"{named}: {first}; {root}: {second}; they must be equal in: {operation}")
    assert world.sum(world.rank + 1) == world.size * (world.size + 1) // 2


CALLS: dict[str, tuple[str, Callable[[World], Any]]] = {
    "barrier": ("barrier", lambda world: world.barrier()),
    "broadcast": ("broadcast from rank 0", lambda world: world.broadcast([1.0])),
    "broadcast 1": ("broadcast from rank 1", lambda world: world.broadcast([1.0], root=1)),
    "sum": ("sum", lambda world: world.sum([1.0])),
    "mean": ("mean", lambda world: world.mean([1.0])),
    "broadcast_object": ("broadcast_object from rank 0", lambda world: world.broadcast_object("x" * world.rank)),
    "broadcast_object 1": ("broadcast_object from rank 1", lambda world: world.broadcast_object("x", root=1)),
    "gather": ("gather to rank 0", lambda world: world.gather("x" * world.rank)),
    "gather 1": ("gather to rank 1", lambda world: world.gather("x", root=1)),
    "allgather": ("allgather", lambda world: world.allgather(None)),
}


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ("sum", "mean"),
        ("broadcast", "broadcast 1"),
        ("broadcast_object", "broadcast_object 1"),
        ("gather", "gather 1"),
        ("gather", "allgather"),
        ("barrier", "sum"),
        ("mean", "broadcast_object"),
    ],
)
def test_different_calls_are_an_error_on_every_rank(world: World, usual: str, other: str) -> None:
    skip_alone(world)
    for odd in range(world.size):
        _, call = CALLS[other if world.rank == odd else usual]
        text = error_on_all(world, MismatchError, lambda call=call: call(world))
        named, root = named_ranks(world, odd)
        first, second = (other, usual) if odd else (usual, other)
        assert text.startswith(f"{named}: {CALLS[first][0]}; {root}: {CALLS[second][0]}; do all ranks make the same")
    assert world.sum(world.rank + 1) == world.size * (world.size + 1) // 2


def test_weights_that_are_none(world: World) -> None:
    """On each rank, or together."""
    for odd, weight in [(odd, weight) for weight in (-1.0, math.nan, math.inf) for odd in range(world.size)]:
        mine = weight if world.rank == odd else 1.0
        text = error_on_all(world, DataError, lambda mine=mine: world.mean([1.0, numpy.ones(3)], weight=mine))
        kind = "number of samples, or of other counted items"
        assert text == f"{world.name(odd)} has weight {weight}; a weight is a {kind}, 0 or more"
    assert "the weight is 0 on every rank" in error_on_all(world, DataError, lambda: world.mean(1.0, weight=0))
    if world.size > 1:
        text = error_on_all(world, DataError, lambda: world.mean(1.0, weight=1e308))
        assert "weights of all ranks add up to inf;" in text
    kinds = [float, int, numpy.float32, numpy.int64]  # of numbers, of which a mean takes any
    assert world.mean([kinds[world.rank % 4](world.rank)]) == [(world.size - 1) / 2]
