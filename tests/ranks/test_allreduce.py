"""The contract of every algorithm in the registry; a new one inherits all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS, make_algorithm
from mpitrain.allreduce.algorithm import DTYPES, FLOATS, INTEGERS, Algorithm, Sequential
from mpitrain.allreduce.group import Group, everyone, lane
from mpitrain.allreduce.hierarchical import hierarchical_steps
from mpitrain.allreduce.shared_memory import NodeArrays
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.profile import Profile
from mpitrain.world.shard import part_of
from tests.ranks.common import (
    assert_equal,
    assert_same_bits,
    error_on_all,
    exact_part,
    expected_sum,
    pattern,
    skip_alone,
    whole_inexact_values,
)

from .placements import PLACEMENTS, placed

INT32 = numpy.dtype(numpy.int32)
OVER_GROUPS = sorted(name for name, entry in ALGORITHMS.items() if entry.over is not None)
HALVES = sorted(name for name, entry in ALGORITHMS.items() if entry.reduce_scatter is not None)
LENGTHS = (0, 1, 2, 7, 1000, 100_003)


@pytest.fixture(params=sorted(ALGORITHMS), scope="module")
def algorithm(request: pytest.FixtureRequest, world: World) -> Iterator[Algorithm]:
    yield make_algorithm(world, request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_exact(world: World, algorithm: Algorithm, dtype: numpy.dtype) -> None:
    for length in LENGTHS:
        for flat in (algorithm.allocate(length, dtype), numpy.empty(length, dtype)):
            assert (flat.shape, flat.dtype) == ((length,), dtype)
            flat[:] = pattern(length, world.rank)
            algorithm.start(flat).wait()
            assert_equal(flat, expected_sum(length, world.size).astype(dtype))


def check_sums(world: World, algorithm: Algorithm) -> None:
    """Exact in memory of the algorithm's own and in other memory, one after the other."""
    for dtype, longest in ((numpy.float32, 1_500_007), (numpy.int16, 200_003)):
        for length in (*LENGTHS[:-1], longest):
            for flat in (algorithm.allocate(length, numpy.dtype(dtype)), numpy.empty(length, dtype)):
                flat[:] = pattern(length, world.rank)
                algorithm.start(flat).wait()
                assert_equal(flat, expected_sum(length, world.size).astype(dtype))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_between_nodes(world: World, name: str, placement: str) -> None:
    """Exact wherever the ranks are. An algorithm that is not for several nodes says so."""
    there = placed(world, placement)
    if name == "shared_memory" and there.num_nodes > 1:
        with pytest.raises(ConfigError, match="for ranks on one node"):
            make_algorithm(there, name)
        return
    check_sums(world, make_algorithm(there, name))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", OVER_GROUPS)
def test_between_nodes_in_hierarchical(world: World, name: str, placement: str) -> None:
    """hierarchical may run any algorithm over a group on its lanes."""
    there = placed(world, placement)
    over, memory = ALGORITHMS[name].over, NodeArrays(there)
    assert over is not None
    check_sums(world, Sequential(there, name, hierarchical_steps(there, memory, over), memory))


def a_part(world: World) -> Group:
    """All ranks but the last one, backwards; the last rank is alone. Messages of the two groups cannot meet."""
    members = tuple(range(world.size - 1))[::-1] if world.rank < world.size - 1 else (world.rank,)
    return Group(world.comm, members, members.index(world.rank))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OVER_GROUPS)
def test_over_a_part_of_the_ranks(world: World, name: str, dtype: numpy.dtype) -> None:
    group, over = a_part(world), ALGORITHMS[name].over
    assert over is not None
    steps = over(group)
    for length in (1, 2, 7, 1000, 300_007):
        flat = pattern(length, world.rank).astype(dtype)
        world.control.wait(steps(flat), "a sum of some ranks")
        total = sum(pattern(length, rank).astype(int) for rank in group.members)
        assert_equal(flat, numpy.asarray(total).astype(dtype))
        whole = world.allgather(flat.tobytes())
        assert {whole[rank] for rank in group.members} == {flat.tobytes()}


def lengths_of(length: int, size: int) -> list[list[int] | None]:
    """Parts as part_of makes them, and others: all in one part, none in the last but one."""
    ragged = [0] * size
    ragged[-1], ragged[0] = length // 3, length - length // 3
    return [None, ragged if size > 1 else [length], [length, *[0] * (size - 1)]]


@pytest.mark.parametrize("length", [1, 7, 1000, 300_007])
@pytest.mark.parametrize("name", HALVES)
def test_reduce_scatter_and_allgather_by_themselves(world: World, name: str, length: int) -> None:
    entry = ALGORITHMS[name]
    assert entry.reduce_scatter is not None
    assert entry.allgather is not None
    for group in (everyone(world), a_part(world)):
        reduce_scatter, allgather = entry.reduce_scatter(group), entry.allgather(group)
        for lengths in lengths_of(length, group.size):
            sizes = lengths or [len(range(length)[part_of(length, i, group.size)]) for i in range(group.size)]
            begin = sum(sizes[: group.index])
            own = slice(begin, begin + sizes[group.index])
            total = sum(pattern(length, rank).astype(int) for rank in group.members)
            flat = pattern(length, world.rank).astype(numpy.float32)
            world.control.wait(reduce_scatter(flat, lengths), "a reduce-scatter")
            assert_equal(flat[own], numpy.asarray(total)[own])
            # The content of the other parts is not promised. They must come from their owners.
            gathered = numpy.full(length, numpy.nan, numpy.float32)
            gathered[own] = flat[own]
            world.control.wait(allgather(gathered, lengths), "an allgather")
            assert_equal(gathered, total)


@pytest.mark.parametrize("dtype", [numpy.float16, numpy.float32, numpy.float64])
def test_inexact_sum_is_close_and_has_the_same_bits_everywhere(world: World, algorithm: Algorithm, dtype: type) -> None:
    """And again when it is repeated."""
    for length in LENGTHS:
        mine = whole_inexact_values(world.rank, length, dtype)
        flat, again = mine.copy(), mine.copy()
        for one in (flat, again):
            algorithm.start(one).wait()
        assert again.tobytes() == flat.tobytes()
        # All ranks have the same bits, so each one need look at a part only.
        assert len(set(world.allgather(hashlib.sha256(flat.tobytes()).digest()))) == 1
        exact, sizes = exact_part(world.rank, world.size, length, dtype)
        # Each of at most size - 1 additions rounds by half a unit of a partial sum, none larger than the sum of sizes.
        bound = (world.size - 1) * numpy.finfo(dtype).eps * sizes
        assert (abs(flat[part_of(length, world.rank, world.size)] - exact) <= bound).all(), length


@pytest.mark.nightly
def test_many_may_be_started(world: World, algorithm: Algorithm) -> None:
    flats = [numpy.full(3, number + world.rank) for number in range(700)]
    handles = [algorithm.start(flat) for flat in flats]
    handles[-1].wait()
    for number, (flat, handle) in enumerate(zip(flats, handles, strict=True)):
        assert handle.test()
        assert (flat == number * world.size + world.size * (world.size - 1) // 2).all()


def test_long_and_short_ones_in_flight(world: World, algorithm: Algorithm) -> None:
    """The buffers have many pieces, or less than one per rank, in allocated memory and elsewhere."""
    lengths = (1, 700_003, 3, 0, 260_001, world.size - 1, 65_537, 1_000_001)
    flats = [
        algorithm.allocate(length, INT32) if index % 3 else numpy.empty(length, INT32)
        for index, length in enumerate(lengths * 2)
    ]
    for flat in flats:
        flat[:] = pattern(flat.size, world.rank)
    handles = [algorithm.start(flat) for flat in flats]
    while not handles[3].test():  # by itself
        pass
    handles[-1].wait()
    assert all(handle.test() for handle in handles)
    for flat in flats:
        assert_equal(flat, expected_sum(flat.size, world.size))


def test_a_buffer_in_flight_cannot_be_taken_away(world: World, algorithm: Algorithm) -> None:
    flat, last = numpy.ones(300_000), numpy.ones(3)
    handle, end = algorithm.start(flat), algorithm.start(last)
    handle.test()
    with pytest.raises(ValueError, match="cannot resize"):
        flat.resize(10)
    del flat, handle  # nobody has it any more but the algorithm
    end.wait()
    assert (last == world.size).all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(world: World, algorithm: Algorithm, dtype: numpy.dtype) -> None:
    top = numpy.iinfo(dtype).max
    flat = numpy.full(5, top, dtype)
    algorithm.start(flat).wait()
    wrapped = (int(top) * world.size) % (1 << 8 * dtype.itemsize)
    assert (flat.view(f"u{dtype.itemsize}") == wrapped).all()


def test_special_values(world: World, algorithm: Algorithm) -> None:
    flat = numpy.array([numpy.inf, -numpy.inf, numpy.nan, -0.0, 1e-45, 3e38], numpy.float32)
    algorithm.start(flat).wait()
    with numpy.errstate(over="ignore"):
        tail = [numpy.float32(1e-45) * world.size, numpy.float32(3e38) * numpy.float32(world.size)]
    numpy.testing.assert_array_equal(flat, [numpy.inf, -numpy.inf, numpy.nan, 0.0, *tail])


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"auto", "native"}))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nans_have_the_same_bits_everywhere(world: World, name: str, dtype: numpy.dtype) -> None:
    """Which of two NaNs a sum is depends on which stands on the left. MPI's own allreduce promises nothing here."""
    whole = numpy.full(200, numpy.nan).astype(dtype)
    whole.view(f"u{dtype.itemsize}")[:] += world.rank + 1
    algorithm = make_algorithm(world, name)
    for begin, length in ((0, 200), (1, 1), (2, 3), (3, 64), (5, 77)):
        flat = whole[begin : begin + length].copy()
        algorithm.start(flat).wait()
        assert numpy.isnan(flat).all()
        assert_same_bits(world, flat)


def test_only_the_slice_is_changed(world: World, algorithm: Algorithm) -> None:
    whole = numpy.ones(1000)
    algorithm.start(whole[10:990]).wait()
    assert (whole[10:990] == world.size).all()
    assert (whole[:10] == 1).all()
    assert (whole[990:] == 1).all()


@pytest.mark.parametrize(
    "flat",
    [
        pytest.param(numpy.ones(10)[::2], id="strided"),
        pytest.param(numpy.ones((2, 5)), id="two dimensions"),
        pytest.param(numpy.frombuffer(b"12345678", numpy.uint8), id="read-only"),
        pytest.param(numpy.ones(3, bool), id="bool"),
        pytest.param(numpy.ones(3, complex), id="complex"),
        pytest.param(numpy.ones(3, ">f4"), id="foreign byte order"),
        pytest.param([1.0, 2.0], id="list"),
    ],
)
def test_refuses_what_it_cannot_sum_in_place(algorithm: Algorithm, flat: object) -> None:
    with pytest.raises(ValueError, match=r"allreduce (takes|works|cannot)"):
        algorithm.start(flat)


@pytest.mark.nightly
def test_many_may_be_made(world: World) -> None:
    """A search over many trainings makes many. MPI's own objects are scarce."""
    for name in ALGORITHMS:
        for _ in range(20):
            flat = numpy.ones(3, numpy.float16)
            make_algorithm(world, name).start(flat).wait()
            assert (flat == world.size).all()


def test_other_names_on_other_ranks(world: World) -> None:
    skip_alone(world)
    text = error_on_all(world, MismatchError, lambda: make_algorithm(world, "direct" if world.rank == 1 else "ring"))
    assert f"{world.name(1)}: direct; {world.name(0)}: ring" in text


def test_unknown_name(world: World) -> None:
    with pytest.raises(ConfigError, match=f"known: {', '.join(sorted(ALGORITHMS))}"):
        make_algorithm(world, "rign")


# Only the ring a - c - b - d - a is fast.
FAST = {"ac", "cb", "bd", "da"}
LINKS = tuple(tuple(0.0 if a == b else 1e9 if a + b in FAST else 1e8 for b in "abcd") for a in "abcd")
PROFILE = Profile("test", 50e-6, 1e8, LINKS, tuple("abcd"))


@pytest.fixture
def four_nodes(world: World) -> World:
    """The world as it would be with its ranks dealt out over 4 nodes."""
    if world.size < 4:
        pytest.skip("needs four ranks")
    nodes = tuple(rank % 4 for rank in range(world.size))
    return world.replaced(node_ranks=nodes, hosts=tuple("abcd"[node] for node in nodes), profile=PROFILE)


def test_the_ring_goes_over_the_fast_links(four_nodes: World) -> None:
    """By the rates of a profile."""
    members = everyone(four_nodes).members
    assert members == tuple(
        rank for node in (0, 2, 1, 3) for rank in range(four_nodes.size) if four_nodes.node_ranks[rank] == node
    )
    mine = lane(four_nodes)
    if four_nodes.rank < 4:  # one lane
        assert mine is not None
        assert mine.members == (0, 2, 1, 3)
    if four_nodes.size == 4:
        hosts = "".join(four_nodes.hosts[rank] for rank in members)
        assert {a + b for a, b in zip(hosts, hosts[1:] + hosts[0], strict=True)} == FAST


@pytest.mark.parametrize("name", sorted({"hierarchical", *OVER_GROUPS}))
def test_sums_in_that_order_are_right(four_nodes: World, name: str) -> None:
    check_sums(four_nodes, ALGORITHMS[name].make(four_nodes))
