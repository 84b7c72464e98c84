"""The contract of the halves of every algorithm that has some, over a whole World."""

from __future__ import annotations

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS, make_algorithm, make_halves
from mpitrain.allreduce.algorithm import DTYPES, AllreduceHandle, Halves
from mpitrain.allreduce.costs import topology_of
from mpitrain.allreduce.registry import cheapest, priced
from mpitrain.errors import ConfigError, MismatchError

from .common import assert_equal, assert_same_bits, error_on_all, expected_sum, pattern, skip_alone
from .placements import PLACEMENTS, placed

HALVES = sorted(name for name, entry in ALGORITHMS.items() if entry.halves or entry.reduce_scatter)
# None, one, fewer than ranks, and some that few numbers of ranks divide.
LENGTHS = (0, 1, 2, 3, 7, 1000, 100_003, 300_007)


def allocated(halves: Halves, length: int, dtype: numpy.dtype) -> numpy.ndarray:
    return numpy.empty(length, dtype) if halves.memory is None else halves.memory.allocate(length, dtype)


def run(world: World, flat: numpy.ndarray, half: object) -> None:
    AllreduceHandle(world, "half", flat, half(flat)).wait()  # type: ignore[operator]


def check(world: World, halves: Halves, length: int, dtype: numpy.dtype) -> None:
    """The sums are in the own parts; what is made of them comes to all ranks. Twice, in the same memory."""
    parts = [halves.own(length, rank) for rank in range(world.size)]
    assert sorted(place for part in parts for place in range(length)[part]) == list(range(length))
    assert len(set(world.allgather(tuple((part.start, part.stop) for part in parts)))) == 1
    own, flat = parts[world.rank], allocated(halves, length, dtype)
    expected = expected_sum(length, world.size).astype(dtype)
    for factor in (1, 2):
        flat[:] = pattern(length, world.rank)
        run(world, flat, halves.reduce_scatter)
        assert_equal(flat[own], expected[own])
        made = flat[own] * dtype.type(factor)
        flat[:] = 101  # nobody reads the other parts any more
        flat[own] = made
        run(world, flat, halves.allgather)
        assert_equal(flat, expected * dtype.type(factor))
        flat[:] = 77  # and nobody reads this rank's part any more
    assert world.allgather(None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_both_halves_are_exact(world: World, name: str, dtype: numpy.dtype) -> None:
    halves = make_halves(world, name)
    for length in (length for length in LENGTHS if dtype == numpy.float32 or length < 2000):
        check(world, halves, length, dtype)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", HALVES)
def test_on_several_nodes(world: World, name: str, placement: str) -> None:
    there = placed(world, placement)
    if name == "shared_memory" and there.num_nodes > 1:
        error_on_all(world, ConfigError, lambda: make_halves(there, name))
        return
    halves = make_halves(there, name)
    for length in LENGTHS:
        check(there, halves, length, numpy.dtype(numpy.float32))


def adds_in_the_same_order(world: World, name: str, num_bytes: int) -> bool:
    """Between nodes, hierarchical may take an algorithm without halves; its own halves then take another one."""
    if name != "hierarchical" or world.num_nodes == 1:
        return True
    lane = topology_of(world).between_nodes()
    return ALGORITHMS[cheapest(num_bytes // lane.lanes, lane, priced(lane))[1]].reduce_scatter is not None


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", sorted(set(HALVES) - {"auto"}))
def test_sums_have_the_bits_of_the_allreduce(world: World, name: str, placement: str) -> None:
    """With numbers of which the order of additions shows, a part is added up as the whole algorithm does it."""
    there = placed(world, placement)
    if name == "shared_memory" and there.num_nodes > 1:
        return
    halves, algorithm = make_halves(there, name), make_algorithm(there, name)
    for length in (1, 7, 1000, 300_007):
        values = numpy.random.default_rng((world.rank, length)).standard_normal(length).astype(numpy.float32)
        flat = allocated(halves, length, values.dtype)
        flat[:] = values
        whole = algorithm.allocate(length, values.dtype)
        whole[:] = values
        run(there, flat, halves.reduce_scatter)
        run(there, flat, halves.allgather)
        algorithm.start(whole).wait()
        if adds_in_the_same_order(there, name, flat.nbytes):
            assert flat.tobytes() == whole.tobytes()
        assert_same_bits(world, flat)


def test_an_algorithm_without_halves(world: World) -> None:
    text = error_on_all(world, ConfigError, lambda: make_halves(world, "native"))
    assert "the algorithm native has no halves" in text
    assert "ring, shared_memory" in text


def test_other_names_on_other_ranks(world: World) -> None:
    skip_alone(world)
    text = error_on_all(world, MismatchError, lambda: make_halves(world, "direct" if world.rank == 1 else "ring"))
    assert f"{world.name(1)}: direct; {world.name(0)}: ring" in text


@pytest.mark.parametrize("name", ["shared_memory", "hierarchical"])
def test_memory_of_another_kind(world: World, name: str) -> None:
    skip_alone(world)
    halves = make_halves(world, name)
    with pytest.raises(ValueError, match="their memory allocates"):
        for _ in halves.allgather(numpy.empty(3)):
            break
