"""World: who the ranks are, arrays and objects between them, and what happens where they disagree."""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import fractions
import math
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy
import pytest

import mpitrain
from mpitrain import World
from mpitrain.allreduce.algorithm import FLOATS, INTEGERS
from mpitrain.errors import CheckpointError, ConfigError, DataError, MismatchError, MpitrainError, TreeError

from .common import assert_same_bits, error_on_all, mean_bound, named_ranks, skip_alone

BFLOAT16 = ml_dtypes.bfloat16


# -- identity ---------------------------------------------------------------------------------------------------


def test_ranks_are_those_of_mpi(world: World) -> None:
    from mpi4py import MPI

    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert world.allgather(world.rank) == list(range(world.size))
    assert world.is_root == (world.rank == 0)
    assert world.generation == 0


def test_all_ranks_are_on_one_node(world: World) -> None:
    assert world.hosts == (socket.gethostname(),) * world.size
    assert world.host == socket.gethostname()
    assert world.num_nodes == 1
    assert world.node_rank == 0
    assert world.node_ranks == (0,) * world.size
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert world.name() == f"rank {world.rank} on {socket.gethostname()}"
    assert world.name(0) == f"rank 0 on {socket.gethostname()}"


def test_communicators_are_private(world: World) -> None:
    from mpi4py import MPI

    assert MPI.Comm.Compare(world.comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert MPI.Comm.Compare(world.objects, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert MPI.Comm.Compare(world.comm, world.objects) == MPI.CONGRUENT


def test_the_ranks_of_a_group_have_their_numbers_and_the_group_is_freed(world: World) -> None:
    from mpi4py import MPI

    from mpitrain.job.recovery import numbers_in_job

    everyone = MPI.COMM_WORLD.Get_group()
    odd = everyone.Incl(list(range(world.size - 1, -1, -2)))
    assert numbers_in_job(odd) == list(range(world.size - 1, -1, -2))
    empty = everyone.Excl(list(range(world.size)))
    assert numbers_in_job(empty) == []
    everyone.Free()
    assert odd == empty == MPI.GROUP_NULL


def test_world_is_made_once_and_never_changes(world: World) -> None:
    assert mpitrain.init() is world
    with pytest.raises(ConfigError, match="called before"):
        mpitrain.init(bucket_mib=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.generation = 1  # type: ignore[misc]


# -- sync ---------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def every_kind_of_leaf(rank: int) -> dict[str, Any]:
    """The same form on every rank, other values."""
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
        result = world.sync(mine, root)
        assert_equal_trees(result, every_kind_of_leaf(root))
        assert_equal_trees(mine, before)
        for new, old in zip(arrays_of(result), arrays_of(mine), strict=True):
            assert not numpy.shares_memory(new, old)
            assert new.flags.writeable


def test_sync_takes_the_root_as_rank_0_by_default(world: World) -> None:
    assert world.sync(world.rank + 7) == 7


def test_dicts_may_be_filled_in_another_order(world: World) -> None:
    names = ["one", "two", "three"]
    order = [names[(world.rank + i) % 3] for i in range(3)]
    result = world.sync({name: numpy.array([len(name), names.index(name) + 10 * world.rank]) for name in order})
    assert list(result) == order
    for name in names:
        assert result[name].tolist() == [len(name), names.index(name)]


@pytest.mark.parametrize("tree", [None, {}, [], [None, {}]], ids=repr)
def test_empty_trees(world: World, tree: Any) -> None:
    assert world.sync(tree) == tree
    assert world.sum(tree) == tree
    assert world.mean(tree) == tree


# -- sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_sum_is_exact(world: World, dtype: numpy.dtype) -> None:
    # At most 7 ranks: below 128, exact in bfloat16 and int8.
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
        "byte": numpy.uint8(200),
        "pair": Pair([numpy.full((2, 1), rank, numpy.int16)], None),
        "transposed": (numpy.arange(6.0).reshape(2, 3) + rank).T,
    }
    expected = {
        "int": total,
        "float": total + 0.5 * size,
        "numpy": numpy.float32(total),
        "byte": numpy.uint8(200 * size % 256),
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


def test_inexact_sums_have_the_same_bits_on_every_rank(world: World) -> None:
    parts = [numpy.random.default_rng(rank).standard_normal(501) for rank in range(world.size)]
    result = world.sum(parts[world.rank])
    exact = [math.fsum(values) for values in zip(*parts, strict=True)]
    sizes = [math.fsum(abs(value) for value in values) for values in zip(*parts, strict=True)]
    assert (abs(result - exact) <= world.size * 2.0**-53 * numpy.array(sizes)).all()
    assert_same_bits(world, result)


# -- mean ---------------------------------------------------------------------------------------------------------


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
    result = world.mean({"x": mine}, weight=weights[world.rank])["x"]
    assert (result.dtype, result.shape) == (dtype, (7, 13))
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
    """Also where there are fewer samples than ranks."""
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


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3, 0, 2), ()], ids=str)
def test_mean_of_awkward_shapes(world: World, shape: tuple[int, ...]) -> None:
    result = world.mean(numpy.full(shape, 2.0 * world.rank), weight=world.rank + 1)
    expected = sum(2.0 * rank * (rank + 1) for rank in range(world.size)) / sum(range(1, world.size + 1))
    assert result.shape == shape
    numpy.testing.assert_allclose(result, numpy.full(shape, expected), rtol=1e-15 * world.size)


# -- trees that cannot be exchanged -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "tree", "text"),
    [
        ("sync", {"a": ["text"]}, r"leaf \['a'\]\[0\] is a str"),
        ("sync", {1, 2}, "leaf at the top is a set"),
        ("sync", [numpy.array([None])], r"leaf \[0\] is an array of Python objects"),
        ("sync", fractions.Fraction(1, 2), "is a Fraction"),
        ("sum", [decimal.Decimal(1)], r"leaf \[0\] is a Decimal"),
        ("sync", {"n": 2**63}, r"leaf \['n'\] is the number 9223372036854775808; it must fit into 64 bits"),
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


# -- ranks that disagree ------------------------------------------------------------------------------------------

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
CASES = [(operation, name) for operation in ("sync", "sum") for name in MISMATCHES]
CASES += [("mean", name) for name in MISMATCHES if name not in KINDS]
CASES += [("sync", name) for name in SYNC_ONLY]


@pytest.mark.parametrize(("operation", "case"), CASES)
def test_different_trees_are_an_error_on_every_rank(world: World, operation: str, case: str) -> None:
    skip_alone(world)
    usual, other, usual_text, other_text = {**MISMATCHES, **SYNC_ONLY}[case]
    # Every position is tried with sync; the others share its code, so one position each will do.
    for odd in range(world.size) if operation == "sync" else [len(case) % world.size]:
        tree = other if world.rank == odd else usual
        text = error_on_all(world, MismatchError, lambda tree=tree: getattr(world, operation)(tree))
        named, root = named_ranks(world, odd)
        first, second = (other_text, usual_text) if odd else (usual_text, other_text)
        if operation == "mean":
            first, second = (line.replace("number float", "number") for line in (first, second))
        assert text.startswith(f"{named}: {first}; {root}: {second}; they must be equal in: {operation}")
    assert world.sum(world.rank + 1) == world.size * (world.size + 1) // 2


def test_a_mean_takes_any_kind_of_number(world: World) -> None:
    kinds = [float, int, numpy.float32, numpy.int64]
    assert world.mean([kinds[world.rank % 4](world.rank)]) == [(world.size - 1) / 2]


CALLS: dict[str, tuple[str, Callable[[World], Any]]] = {
    "barrier": ("barrier", lambda world: world.barrier()),
    "sync": ("sync from rank 0", lambda world: world.sync([1.0])),
    "sync 1": ("sync from rank 1", lambda world: world.sync([1.0], root=1)),
    "sum": ("sum", lambda world: world.sum([1.0])),
    "mean": ("mean", lambda world: world.mean([1.0])),
    "broadcast": ("broadcast from rank 0", lambda world: world.broadcast("x" * world.rank)),
    "broadcast 1": ("broadcast from rank 1", lambda world: world.broadcast("x", root=1)),
    "gather": ("gather to rank 0", lambda world: world.gather("x" * world.rank)),
    "gather 1": ("gather to rank 1", lambda world: world.gather("x", root=1)),
    "allgather": ("allgather", lambda world: world.allgather(None)),
}


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ("sum", "mean"),
        ("sync", "sync 1"),
        ("broadcast", "broadcast 1"),
        ("gather", "gather 1"),
        ("gather", "allgather"),
        ("barrier", "sum"),
        ("mean", "broadcast"),
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


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf], ids=str)
def test_a_weight_that_is_no_number_of_samples(world: World, weight: float) -> None:
    for odd in range(world.size):
        mine = weight if world.rank == odd else 1.0
        text = error_on_all(world, DataError, lambda mine=mine: world.mean([1.0, numpy.ones(3)], weight=mine))
        assert text == f"{world.name(odd)} has weight {weight}; a weight is a number of samples, 0 or more"
    assert world.sum(world.rank + 1) == world.size * (world.size + 1) // 2


def test_weights_that_are_all_0(world: World) -> None:
    assert "the weight is 0 on every rank" in error_on_all(world, DataError, lambda: world.mean(1.0, weight=0))


def test_weights_that_add_up_to_infinity(world: World) -> None:
    skip_alone(world)
    assert "weights of all ranks add up to inf;" in error_on_all(
        world, DataError, lambda: world.mean(1.0, weight=1e308)
    )


# -- objects ------------------------------------------------------------------------------------------------------


def test_barrier(world: World) -> None:
    assert world.barrier() is None


def test_broadcast_from_every_rank(world: World) -> None:
    for root in range(world.size):
        value = {"from": root, "array": numpy.arange(root), "none": None}
        # What the others pass is not looked at: it need not even be possible to pickle it.
        result = world.broadcast(value if world.rank == root else lambda: None, root)
        assert result["from"] == root
        assert result["array"].tolist() == list(range(root))
        assert (result is value) == (world.rank == root)


def test_gather_to_every_rank(world: World) -> None:
    for root in range(world.size):
        result = world.gather("x" * world.rank, root)
        assert result == (["x" * rank for rank in range(world.size)] if world.rank == root else None)


def test_allgather_of_unequal_objects(world: World) -> None:
    result = world.allgather([world.rank] * (10 * world.rank))
    assert result == [[rank] * (10 * rank) for rank in range(world.size)]


def test_large_objects(world: World) -> None:
    """5 MB: far beyond what any MPI sends without an answer from the receiver."""
    last = world.size - 1
    large = numpy.random.default_rng(0).bytes(5_000_000)
    mine = large if world.rank == last else None
    assert world.broadcast(mine, root=last) == large
    assert world.allgather(mine) == [None] * last + [large]


def test_a_large_message_around_the_ring(world: World) -> None:
    """5 MB from rank to rank."""
    array = numpy.arange(625_000.0)
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.rank == 0:
        world.send(array, following)
    received = world.receive(previous)
    assert received.tobytes() == (array + previous).tobytes()
    if world.rank:
        world.send(received + 1, following)


def test_messages_arrive_by_tag_and_in_order(world: World) -> None:
    """To every rank, this one too."""
    for to in range(world.size):
        for number in range(3):
            for tag in (0, 1, 31767):
                world.send((world.rank, tag, number), to, tag)
    for source in reversed(range(world.size)):
        for tag in (31767, 0, 1):
            for number in range(3):
                assert world.receive(source, tag) == (source, tag, number)


def test_a_message_to_oneself_is_a_copy(world: World) -> None:
    value = [numpy.zeros(200_000)]
    world.send(value, world.rank)
    value[0][:] = 1
    assert not world.receive(world.rank)[0].any()
    # Nobody else could send it, so waiting would never end.
    with pytest.raises(MismatchError, match="has sent itself nothing with tag 0"):
        world.receive(world.rank)


@pytest.mark.parametrize("wrong", [-1, "size", 10**6])
def test_ranks_that_do_not_exist(world: World, wrong: int | str) -> None:
    rank = world.size if wrong == "size" else int(wrong)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("root", lambda: world.sync(1.0, root=rank)),
        ("root", lambda: world.broadcast(1, root=rank)),
        ("root", lambda: world.gather(1, root=rank)),
        ("to", lambda: world.send(1, rank)),
        ("source", lambda: world.receive(rank)),
    ]
    for argument, call in calls:
        with pytest.raises(ValueError, match=f"{argument}={rank}; ranks are 0 to {world.size - 1}"):
            call()
    assert world.sum(1) == world.size


@pytest.mark.parametrize("tag", [-1, -999, 32768])
def test_tags_that_are_not_the_users(world: World, tag: int) -> None:
    with pytest.raises(ValueError, match=f"tag={tag}; tags are 0 to 31767"):
        world.send(1, 0, tag)
    with pytest.raises(ValueError, match=f"tag={tag}; tags are 0 to 31767"):
        world.receive(0, tag)


def test_print(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.print("step", 3, None)
    assert capsys.readouterr().out == ("step 3 None\n" if world.rank == 0 else "")
    world.print("step", 3, all_ranks=True)
    assert capsys.readouterr().out == f"[rank {world.rank} on {socket.gethostname()}] step 3\n"
    world.print()
    assert capsys.readouterr().out == ("\n" if world.rank == 0 else "")


# -- shard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [(7,), (14, 14, 14), (8, 8, 5), (12, 12, 1), (9, 0, 9)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_parts_are_disjoint_complete_and_in_order(world: World, lengths: tuple[int, ...]) -> None:
    starts = numpy.cumsum((0, *lengths))
    batches = [numpy.arange(begin, begin + length) for begin, length in zip(starts, lengths, strict=False)]
    parts = list(world.shard(batches))
    assert len(parts) == len(batches)
    every = world.allgather(parts)
    for index, batch in enumerate(batches):
        of_ranks = [its[index] for its in every]
        assert numpy.concatenate(of_ranks).tolist() == batch.tolist()
        sizes = [len(part) for part in of_ranks]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_shard_of_trees_from_a_generator(world: World) -> None:
    def batches() -> Any:
        for length in (10, 9):
            yield {"x": numpy.arange(2 * length).reshape(length, 2), "y": (numpy.arange(length), None)}

    for part, length in zip(world.shard(batches()), (10, 9), strict=True):
        rows = numpy.array_split(numpy.arange(length), world.size)[world.rank]
        assert part["x"].tolist() == [[2 * row, 2 * row + 1] for row in rows]
        assert part["y"][0].tolist() == rows.tolist()
        assert part["y"][1] is None


def test_shard_starts_where_it_is_told(world: World) -> None:
    batches = [numpy.full(7, 0), numpy.full(7, 1), numpy.full(1, 2)]
    whole = [part.tolist() for part in world.shard(batches)]
    for start in range(4):
        assert [part.tolist() for part in world.shard(batches, start=start)] == whole[start:]
    with pytest.raises(DataError, match="there are 3 batches, and the shard starts at batch 4"):
        list(world.shard(batches, start=4))
    with pytest.raises(ValueError, match="start=-1"):
        next(world.shard(batches, start=-1))


def test_shard_of_nothing(world: World) -> None:
    for start in (0, 1):
        with pytest.raises(DataError, match=f"there are 0 batches, and the shard starts at batch {start}") as caught:
            list(world.shard([], start=start))
        assert caught.value.known_everywhere


def test_first_batch_smaller_than_the_ranks(world: World) -> None:
    for start in (0, 1):
        shard = world.shard([numpy.zeros(world.size - 1), numpy.zeros(world.size)], start=start)
        with pytest.raises(DataError, match=f"batch 0 has {world.size - 1} samples for {world.size} ranks") as caught:
            next(shard)
        assert caught.value.known_everywhere


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((numpy.zeros(8), numpy.zeros(9)), r"found \[0\] 8, \[1\] 9"),
        ([numpy.zeros(8), 3.0], r"found \[0\] 8, \[1\] a number"),
        ({"x": numpy.array(1.0)}, r"found \['x'\] a number"),
        ([], "found no arrays"),
    ],
)
def test_batches_without_a_number_of_samples(world: World, batch: Any, text: str) -> None:
    shard = world.shard([numpy.zeros(7), batch])
    next(shard)
    with pytest.raises(DataError, match=f"batch 1: .*{text}"):
        next(shard)


# -- together -----------------------------------------------------------------------------------------------------


def test_together_without_an_error(world: World) -> None:
    with world.together("do nothing"):
        done = True
    assert done
    assert world.sum(1) == world.size


def failing(world: World, errors: dict[int, Exception]) -> None:
    with world.together("try something"):
        if world.rank in errors:
            raise errors[world.rank]


@pytest.mark.parametrize(
    "kind", [DataError, CheckpointError, ConfigError, MpitrainError], ids=lambda kind: kind.__name__
)
def test_an_error_of_ours_on_one_rank_is_raised_on_all(world: World, kind: type[MpitrainError]) -> None:
    for odd in range(world.size):
        error = kind("the file is missing")
        with pytest.raises(kind) as caught:
            failing(world, {odd: error})
        assert type(caught.value) is kind
        assert caught.value.known_everywhere
        if world.rank == odd:
            assert caught.value is error
        else:
            assert str(caught.value) == f"{world.name(odd)}, try something: the file is missing"
        assert world.sum(1) == world.size


def test_another_error_on_one_rank_is_raised_on_all(world: World) -> None:
    for odd in range(world.size):
        text = error_on_all(world, MpitrainError, lambda odd=odd: failing(world, {odd: KeyError("weights")}))
        assert text == f"{world.name(odd)}, try something: KeyError: 'weights'"


def test_the_error_of_the_lowest_rank_is_raised(world: World) -> None:
    skip_alone(world)
    low, high = world.size - 2, world.size - 1
    with pytest.raises(MpitrainError) as caught:
        failing(world, {low: DataError("first"), high: ConfigError("second")})
    assert type(caught.value) is DataError
    assert str(caught.value).endswith("first")


def test_the_cause_is_kept_on_the_rank_that_failed(world: World) -> None:
    error = OSError("disk full")
    with pytest.raises(MpitrainError) as caught:
        failing(world, {0: error})
    assert caught.value.__cause__ is (error if world.rank == 0 else None)
