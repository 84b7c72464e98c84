"""World.broadcast, sum and mean of arrays and trees."""

from __future__ import annotations

import collections
import copy
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce.algorithm import FLOATS, INTEGERS

from .common import assert_same_bits, mean_bound

BFLOAT16 = ml_dtypes.bfloat16


class Pair(NamedTuple):
    left: Any
    right: Any


def every_kind_of_leaf(rank: int) -> dict[str, Any]:
    """A tree of the same form on every rank, with different values."""
    numbers = numpy.arange(12) + 100 * rank
    readonly = numbers.astype(numpy.int32)
    readonly.flags.writeable = False
    nan = numpy.array([numpy.nan, -0.0, numpy.inf, rank], numpy.float32)
    return {
        "floats": {str(dtype): numbers.astype(dtype) for dtype in FLOATS},
        "integers": {str(dtype): numbers.astype(dtype) for dtype in INTEGERS},
        "special values": nan,
        "bool": numbers % (rank + 2) == 0,
        "complex": [numbers.astype(numpy.complex64), numbers * 1j],
        "times": (numbers.astype("datetime64[s]"), numbers.astype("timedelta64[us]")),
        "texts": numpy.array([f"r{rank}", "é"], "U7"),
        "records": numpy.array([(rank, 0.5)], [("a", "i2"), ("b", "f8")]),
        "long double": numbers.astype(numpy.longdouble) / 3,
        "foreign byte order": [numbers.astype(">f8"), numbers.astype(">i2")],
        "shapes": {
            "none": numpy.array(rank + 0.5),
            "empty": numpy.empty((0, 3), numpy.float32),
            "many": numbers.reshape(1, 2, 3, 2, 1),
            "Fortran": numpy.asfortranarray(numbers.reshape(3, 4).astype(float)),
            "transposed": numbers.reshape(3, 4).T,
            "every other": numbers[::2],
            "backwards": numbers[::-1],
            "repeated": numpy.broadcast_to(numbers[1:2], (4,)),
            "read-only": readonly,
        },
        "python": [rank, rank + 0.25, rank % 2 == 0, complex(rank, 1), -(2**63) + rank],
        "numpy": [
            numpy.float32(rank),
            numpy.int8(rank),
            numpy.bool_(rank % 2),
            BFLOAT16(rank),
            numpy.uint64(2**64 - 1),
        ],
        "numpy time": numpy.datetime64(rank, "D"),
        "containers": [Pair(numbers.copy(), (rank,)), collections.OrderedDict(b=rank, a=numbers), [], {}, (), None],
        "mixed keys": {1: rank, "1": numbers, (0, 1): [None, {"deep": (numbers,)}]},
        "default": collections.defaultdict(list, x=numbers),
        "counter": collections.Counter(x=rank),
    }


def assert_equal_trees(found: Any, expected: Any) -> None:
    """Types, order of keys, dtypes, shapes and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal_trees(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert_equal_trees(mine, other)
    elif isinstance(expected, numpy.ndarray | numpy.generic):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if expected.dtype == numpy.longdouble:  # its padding bytes mean nothing
            assert (found == expected).all()
        else:
            assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def arrays_of(tree: Any) -> list[numpy.ndarray]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [array for child in tree for array in arrays_of(child)]
    return [tree] if isinstance(tree, numpy.ndarray) else []


def test_sync_gives_every_rank_the_tree_of_the_root(world: World) -> None:
    for root in range(world.size):
        mine = every_kind_of_leaf(world.rank)
        before = copy.deepcopy(mine)
        result = world.broadcast(mine, root)
        assert_equal_trees(result, every_kind_of_leaf(root))
        assert_equal_trees(mine, before)
        for new, old in zip(arrays_of(result), arrays_of(mine), strict=True):
            assert not numpy.shares_memory(new, old)
            assert new.flags.writeable


def test_dicts_may_be_filled_in_another_order(world: World) -> None:
    names = ["one", "two", "three"]
    order = [names[(world.rank + i) % 3] for i in range(3)]
    result = world.broadcast({name: numpy.array([len(name), names.index(name) + 10 * world.rank]) for name in order})
    assert list(result) == order
    for name in names:
        assert result[name].tolist() == [len(name), names.index(name)]


@pytest.mark.parametrize("tree", [None, {}, [], [None, {}]], ids=repr)
def test_empty_trees(world: World, tree: Any) -> None:
    assert world.broadcast(tree) == tree
    assert world.sum(tree) == tree
    assert world.mean(tree) == tree


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_sum_is_exact(world: World, dtype: numpy.dtype) -> None:
    # With at most 7 ranks the sums are below 128, so they are exact in bfloat16 and int8.
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (2, 3), (0, 4), (1009,)]
    values = [numpy.asarray(numpy.arange(math.prod(shape)).reshape(shape) % 4) for shape in shapes]
    mine = [numpy.asarray(its + 3 * world.rank, dtype) for its in values]
    before = copy.deepcopy(mine)
    for result, its in zip(world.sum(mine), values, strict=True):
        expected = world.size * its + 3 * sum(range(world.size))
        assert_equal_trees(result, numpy.asarray(expected, dtype))
    assert_equal_trees(mine, before)
    for shape, its in zip(shapes, values, strict=True):  # each one by itself, too
        assert world.sum(numpy.asarray(its, dtype)).shape == shape


def test_sum_of_a_tree_keeps_types(world: World) -> None:
    size, total = world.size, sum(range(world.size))
    rank = world.rank
    tree = {
        "int": rank,
        "float": rank + 0.5,
        "numpy": numpy.float32(rank),
        "byte": numpy.uint8(20),
        "pair": Pair([numpy.full((2, 1), rank, numpy.int16)], None),
        "transposed": (numpy.arange(6.0).reshape(2, 3) + rank).T,
    }
    expected = {
        "int": total,
        "float": total + 0.5 * size,
        "numpy": numpy.float32(total),
        "byte": numpy.uint8(20 * size),
        "pair": Pair([numpy.full((2, 1), total, numpy.int16)], None),
        "transposed": (size * numpy.arange(6.0).reshape(2, 3) + total).T,
    }
    assert_equal_trees(world.sum(tree), expected)


def test_sum_of_large_arrays_of_several_dtypes(world: World) -> None:
    # Large enough for the ring, and lengths that no number of ranks divides.
    places = numpy.arange(300_007)
    rank, total = world.rank, sum(range(world.size))
    result = world.sum([(places + rank).astype(dtype) for dtype in ("i8", "f8", "u4")])
    for array, dtype in zip(result, ("i8", "f8", "u4"), strict=True):
        numpy.testing.assert_array_equal(array, (world.size * places + total).astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weighting", ["equal", "by rank", "last only", "some none", "fractions"])
def test_mean_is_weighted(world: World, dtype: numpy.dtype, weighting: str) -> None:
    size = world.size
    weights = {
        "equal": [1.0] * size,
        "by rank": [rank + 1.0 for rank in range(size)],
        "last only": [0.0] * (size - 1) + [3.0],
        "some none": [float(rank % 2 == 0) * (rank + 2) for rank in range(size)],
        "fractions": [0.1 + 0.37 * rank for rank in range(size)],
    }[weighting]
    parts = [numpy.random.default_rng(rank).standard_normal((7, 13)).astype(dtype) for rank in range(size)]
    mine = parts[world.rank] if weights[world.rank] else numpy.full((7, 13), numpy.nan, dtype)
    result, *empty = world.mean([mine, numpy.empty((3, 0), dtype)], weight=weights[world.rank])
    assert (result.dtype, result.shape, empty[0].shape) == (dtype, (7, 13), (3, 0))
    wide = [weight * part.astype(numpy.float64) for weight, part in zip(weights, parts, strict=True)]
    exact = sum(wide) / math.fsum(weights)
    bound = mean_bound(dtype, size, sum(abs(part) for part in wide) / math.fsum(weights))
    assert (abs(result.astype(numpy.float64) - exact) <= bound).all()
    assert_same_bits(world, result)


def test_one_rank_with_all_the_weight_gives_its_very_bits(world: World) -> None:
    values = numpy.random.default_rng(5).standard_normal(100)
    for chosen in range(world.size):
        mine = values if world.rank == chosen else numpy.full(100, numpy.inf)
        assert world.mean(mine, weight=17 if world.rank == chosen else 0).tobytes() == values.tobytes()


@pytest.mark.parametrize("extra", [-1, 0, 1, 30])
def test_parts_of_a_batch_have_the_mean_of_the_whole(world: World, extra: int) -> None:
    """The mean is right also if there are fewer samples than ranks."""
    length = max(1, world.size + extra)
    whole = numpy.random.default_rng(3).standard_normal((length, 11)) + 2.0
    mine = numpy.array_split(whole, world.size)[world.rank]
    part_mean = mine.mean(axis=0) if len(mine) else numpy.full(11, numpy.nan)
    expected = [math.fsum(column) / length for column in whole.T]
    numpy.testing.assert_allclose(world.mean(part_mean, weight=len(mine)), expected, rtol=1e-14, atol=1e-15)


def test_mean_of_numbers_is_float(world: World) -> None:
    result = world.mean([world.rank, world.rank + 0.5, numpy.int32(world.rank), True, None])
    middle = (world.size - 1) / 2
    assert [type(value) for value in result] == [float, float, numpy.float64, float, type(None)]
    numpy.testing.assert_allclose([float(value) for value in result[:4]], [middle, middle + 0.5, middle, 1.0], 1e-15)
