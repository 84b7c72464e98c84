"""Adasum on every number of ranks, against a float64 reference of its own; bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.allreduce.group import Group
from mpitrain.horovod import adasum as module
from mpitrain.horovod.adasum import adasum_steps
from tests.ranks.common import assert_same_bits, skip_alone

LENGTHS = [(), (0,), (1,), (0, 1, 0), (2, 3), (1000,), (7, 0, 500, 1, 33, 400), (5003,)]


def adasum(world: World, flat: numpy.ndarray, lengths: Sequence[int]) -> None:
    """Replace `flat` by the adaptive sum over ranks of each of these tensors in it."""
    tensors = [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    if world.size > 1 and flat.size:
        group = Group(world.comm, tuple(range(world.size)), world.rank)
        world.control.wait(adasum_steps(group, tensors)(flat), "adasum")


def two(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The formula of the paper, element by element."""
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    squares = math.fsum(x * x for x in a), math.fsum(y * y for y in b)
    of_a, of_b = (1 - dot / (2 * square) if square else 1.0 for square in squares)
    return [of_a * x + of_b * y for x, y in zip(a, b, strict=True)]


def tree(vectors: list[list[float]]) -> list[float]:
    """The reference: neighbours first. What is beyond a power of two has met in pairs before."""
    beyond = len(vectors) - 2 ** int(math.log2(len(vectors)))
    pairs = [two(vectors[2 * i], vectors[2 * i + 1]) for i in range(beyond)]
    vectors = pairs + vectors[2 * beyond :]
    while len(vectors) > 1:
        vectors = [two(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def gradient(length: int, rank: int, number: int) -> numpy.ndarray:
    """Ranks agree in part, and the fourth one has zeros in one tensor."""
    shared = numpy.random.default_rng(number).standard_normal(length)
    own = numpy.random.default_rng([number, rank]).standard_normal(length)
    return (shared + 2 * own) * (1 + rank) * (rank != 3 or number != 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_that_of_one_process(
    world: World, lengths: tuple[int, ...], dtype: numpy.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a long tensor is made in several blocks."""
    if len(lengths) > 5:
        monkeypatch.setattr(module, "_AT_ONCE", 10)
    of_ranks = [
        [gradient(length, rank, number).astype(dtype) for number, length in enumerate(lengths)]
        for rank in range(world.size)
    ]
    flat = numpy.concatenate([*of_ranks[world.rank], numpy.empty(0, dtype)])
    adasum(world, flat, lengths)
    assert flat.dtype == dtype
    assert_same_bits(world, flat)
    begin = 0
    # Half a unit for each of at most three combinations, each of which may double what the ones before have lost.
    unit = float(numpy.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7
    for number, length in enumerate(lengths):
        vectors = [one[number].astype(float).tolist() for one in of_ranks]
        most = float(numpy.sum(numpy.abs(vectors), axis=0).max(initial=0))
        numpy.testing.assert_allclose(
            flat[begin : begin + length].astype(float), tree(vectors), rtol=0, atol=(world.size > 1) * 4 * unit * most
        )
        begin += length


def test_each_tensor_has_its_own_products(world: World) -> None:
    """Of a group, the first tensor is equal on all ranks and stays; the second is orthogonal and is summed. Exactly."""
    skip_alone(world)
    flat = numpy.concatenate([[3.0, -1.0, 0.5], 2.0 ** numpy.arange(7) * (numpy.arange(7) == world.rank)])
    adasum(world, flat, [3, 7])
    expected = [3.0, -1.0, 0.5, *(2.0 ** numpy.arange(7) * (numpy.arange(7) < world.size))]
    numpy.testing.assert_array_equal(flat, expected)


def test_gradients_that_are_not_finite(world: World) -> None:
    """All ranks get NaN in that tensor, and the other one is as ever."""
    skip_alone(world)
    flat = numpy.array([numpy.inf if world.rank == world.size - 1 else 1.0, 1.0, 4.0])
    adasum(world, flat, [2, 1])
    assert_same_bits(world, flat)
    assert numpy.isnan(flat[:2]).any()
    assert flat[2] == 4
