"""Helpers of the tests on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy
import pytest
from mpi4py import MPI

from mpitrain import World
from mpitrain.errors import MpitrainError
from mpitrain.job.worlds import make_world
from mpitrain.state.resume import add_up
from mpitrain.world.shard import part_of


def error_on_all(world: World, kind: type[MpitrainError], call: Callable[[], Any]) -> str:
    """`call` must raise one and the same error of this class on every rank. Returns its text.

    Getting it from all ranks shows that they can still talk to each other.
    """
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert caught.value.known_everywhere
    texts = world.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def named_ranks(world: World, odd: int) -> tuple[str, str]:
    """The two ranks that the message names where `odd` is the only one that differs: another one, and rank 0."""
    return world.name(odd or 1), world.name(0)


def skip_alone(world: World) -> None:
    """Skip the test on one rank, which cannot disagree with another."""
    if world.size == 1:
        pytest.skip("needs two ranks")


def first_ranks(world: World, size: int) -> World | None:
    """A World of the first ranks, which they free; None on the others. All ranks call it."""
    comm = world.comm.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
    return make_world(comm) if world.rank < size else None


def assert_same_bits(world: World, *arrays: numpy.ndarray) -> None:
    """The arrays have the same bits on every rank."""
    assert len(set(world.allgather(b"".join(array.tobytes() for array in arrays)))) == 1


def assert_equal(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    """Every element; of large arrays a tenth of assert_array_equal's time, which looks for NaNs first."""
    if not numpy.array_equal(found, expected):
        numpy.testing.assert_array_equal(found, expected)


@lru_cache
def pattern(length: int, rank: int) -> numpy.ndarray:
    """Small integers that differ from rank to rank and place to place; their sums are exact in every dtype."""
    # Sums of 7 ranks stay below 2^7: exact in bfloat16 (8 bits) and no overflow in int8.
    return ((numpy.arange(length) * 7 + rank * 5) % 17).astype(numpy.int8)


@lru_cache
def expected_sum(length: int, size: int) -> numpy.ndarray:
    """Computed without any of our code, in int64."""
    return sum((pattern(length, rank) for rank in range(size)), numpy.zeros(length, numpy.int64))


def inexact_values(rank: int, places: numpy.ndarray, dtype: type) -> numpy.ndarray:
    """Numbers with all their bits in use, that any rank can compute for any other."""
    return (3.0 * numpy.sin((places + 1.0) * (rank + 1.37))).astype(dtype)


@lru_cache
def whole_inexact_values(rank: int, length: int, dtype: type) -> numpy.ndarray:
    """The same for every algorithm, and not to be changed."""
    return inexact_values(rank, numpy.arange(length), dtype)


@lru_cache
def exact_part(rank: int, size: int, length: int, dtype: type) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The sums over all ranks at the places of one rank's part, and the sums of their sizes, in more bits."""
    places = numpy.arange(length)[part_of(length, rank, size)]
    parts = [inexact_values(other, places, dtype).astype(numpy.longdouble) for other in range(size)]
    start = numpy.zeros(len(places), numpy.longdouble)
    return sum(parts, start), sum((abs(part) for part in parts), start)


def unit_roundoff(dtype: numpy.dtype) -> float:
    """Half the distance from 1 to the next number."""
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[str(dtype)]
    return 2.0 ** -(bits + 1)


def smallest(dtype: numpy.dtype) -> float:
    """The smallest number above 0."""
    return {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}[str(dtype)]


def mean_bound(dtype: numpy.dtype, size: int, magnitude: numpy.ndarray) -> numpy.ndarray:
    """How far a weighted mean over `size` ranks may be off, where `magnitude` is the mean of the absolute values.

    Every term is rounded twice (its share and the product), every one of size - 1 additions once; one to spare
    for the terms of second order. Below the normal numbers roundings are absolute.
    """
    return (size + 2) * unit_roundoff(dtype) * magnitude + size * smallest(dtype)


def added_up(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What belongs to single ranks, as one rank takes it over."""
    total: dict[str, Any] = {}
    for part in parts:
        add_up(total, part)
    return total
